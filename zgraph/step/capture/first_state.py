"""Optimizer state made before the first step, so that this step runs the graph of all later ones.

Most optimizers make their state in their first step, from zeros: a graph of that step would run once. So the state is
made as it is before the step, and becomes an input of the step's graph. The optimizers in `SAME_FIRST_STEP` do nothing
else in their first step. For others, the step is captured again, and the two graphs are compared: if they differ in
more than the state, the first step has a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, optim
from torch.fx.node import map_arg

from zgraph.analysis.liveness import placements
from zgraph.graph import meta, nodes
from zgraph.optimizers.adamw_8bit import AdamW8bit
from zgraph.step.capture.capture import Captured
from zgraph.step.capture.lifted import Lifted
from zgraph.step.capture.outputs import Left, NewState, Output, SkipFlag, values_of

aten = torch.ops.aten
# Operators whose result is one number everywhere, and that number; None: the argument at index 1.
FILLS = MappingProxyType(
    {
        aten.zeros.default: 0,
        aten.zeros_like.default: 0,
        aten.new_zeros.default: 0,
        aten.ones.default: 1,
        aten.ones_like.default: 1,
        aten.full.default: None,
        aten.full_like.default: None,
    }
)
SAME_FIRST_STEP = frozenset(
    {AdamW8bit, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RMSprop, optim.Adadelta}
)


@dataclass(frozen=True)
class FirstState:
    """A tensor that the first step adds to the state of an optimizer.

    Attributes:
        output: where the tensor belongs.
        node: node of the first step's graph that makes it, before the optimizer writes to it.
        value: this rank's part of it, as that node makes it.
    """

    output: NewState
    node: fx.Node
    value: Tensor


def first_state(captured: Captured, lifted: Lifted) -> list[FirstState] | None:
    """Return the state that a step makes, before the optimizers write to it.

    None if it does not begin as constants, if the step may be skipped and then makes none, or if tensors are offloaded,
    whose state is too large to be made at once.
    """
    effects = captured.effects
    if lifted.resting is not None or effects.constants or any(isinstance(one, SkipFlag) for one in effects.outputs):
        return None
    graph, found = captured.gm.graph, placements(captured.gm.graph)
    made: dict[fx.Node, FirstState] = {}
    for output, node in values_of(NewState, effects.outputs, nodes.returned_by(graph)):
        firsts = [found.storages[number].first for number in found.lies_in[node]]
        first = firsts[0]
        value = _constant(captured.gm, first) if len(firsts) == 1 and first not in made else None
        if value is None or value.shape != meta.tensor_value(node).shape:
            return None
        made[first] = FirstState(output, first, value)
    return list(made.values())


def _constant(gm: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """Return the value of a node that fills a tensor with a number or copies a constant; None for others."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if target is aten.lift_fresh_copy.default:  # torch.tensor(0.0), as Adam makes its step
        source = node.all_input_nodes[0]
        return getattr(gm, str(source.target)).clone() if source.op == "get_attr" else None
    if target not in FILLS:
        return None
    fill = FILLS[target] if FILLS[target] is not None else node.args[1]
    if not isinstance(fill, int | float):
        return None
    known = meta.tensor_value(node)
    if any(isinstance(size, torch.SymInt) for size in (*known.shape, *known.stride())):
        return None
    made = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device=known.device)
    return made.fill_(fill)


def put_first_state(made: Sequence[FirstState], lifted: Lifted) -> Callable[[], None]:
    """Put the state into its optimizers; the result takes it out again."""
    left = Left(lifted)
    for one in made:
        one.output.put(one.value, left)

    def remove() -> None:
        for one in made:
            state, parameter = lifted.optimizers[one.output.number].optimizer.state, left.parameter(one.output.position)
            del state[parameter][one.output.key]
            if not state[parameter]:
                del state[parameter]

    return remove


def with_state(first: Captured, made: Sequence[FirstState], lifted: Lifted) -> Captured | None:
    """Return the first step as a step that is given the state `made`, which its optimizers have now.

    None unless the optimizers are of `SAME_FIRST_STEP`, and no line of the step itself sets state. Changes the graph.
    """
    effects = first.effects
    if effects.keeps_state or not all(_steps_alike(lifted.optimizers[number].optimizer) for number in effects.steps):
        return None
    graph = first.gm.graph
    made_by = {(one.output.number, one.output.position, one.output.key): one.node for one in made}
    given, begin = graph.find_nodes(op="placeholder"), _state_begins(lifted)
    before, last = iter(given[begin:]), given[begin - 1]
    for name, entry in zip(lifted.names()[begin:], _state_entries(lifted), strict=True):
        if entry not in made_by:
            last = next(before)
            continue
        node = made_by[entry]
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        meta.set_value(last, meta.value(node))
        meta.set_kept(last, "state")
        node.replace_all_uses_with(last)
        sources = node.all_input_nodes
        for one in (node, *(one for one in sources if one.op == "get_attr" and len(one.users) == 1)):
            graph.erase_node(one)
    left = zip(effects.outputs, nodes.returned_by(graph), strict=True)
    kept = [(output, node) for output, node in left if not isinstance(output, NewState)]
    nodes.output_of(graph).args = ([node for _, node in kept],)
    first.gm.recompile()
    return replace(first, effects=replace(effects, outputs=tuple(output for output, _ in kept)))


def _steps_alike(optimizer: optim.Optimizer) -> bool:
    is_tested = not any(group.get("capturable") for group in optimizer.param_groups)  # they need a GPU
    return type(optimizer) in SAME_FIRST_STEP and is_tested


def runs_alike(first: Captured, made: Sequence[FirstState], later: Captured, lifted: Lifted) -> bool:
    """Return whether a step captured with its state (`later`) runs the first one's operators on the state `made`.

    Both graphs have the same operators in the same order; inputs of `later` take the places of the nodes in `made`.
    """
    one, two = first.effects, later.effects
    if two.makes_state or two.constants:
        return False
    if (one.steps, one.cleared, one.tree, dict(one.leaves)) != (two.steps, two.cleared, two.tree, dict(two.leaves)):
        return False
    begins = {new.node for new in made}
    inputs = dict(_state_inputs(later, lifted))
    places = [inputs.get((new.output.number, new.output.position, new.output.key)) for new in made]
    same = dict(zip((new.node for new in made), places, strict=True))
    if None in same.values():
        return False
    given = set(same.values())
    ours = [node for node in first.gm.graph.nodes if node not in begins and not _feeds_only(node, begins)]
    theirs = [node for node in later.gm.graph.nodes if node not in given]
    if len(ours) != len(theirs):
        return False
    for node, other in zip(ours, theirs, strict=True):
        if node.op == "output":
            break
        if node.op != other.op or not _same_call(first.gm, node, later.gm, other, same):
            return False
        same[node] = other
    left = zip(one.outputs, nodes.returned_by(first.gm.graph), strict=True)
    kept = [(_place(output), same.get(node)) for output, node in left if not isinstance(output, NewState)]
    found = zip(two.outputs, nodes.returned_by(later.gm.graph), strict=True)
    return kept == [(_place(output), node) for output, node in found]


def _place(output: Output) -> tuple[Any, ...]:
    """Return where an output belongs, without the tensors of its capture."""
    return (type(output), *(getattr(output, name, None) for name in ("place", "position", "number", "scaler")))


def _state_begins(lifted: Lifted) -> int:
    """Return the index of the first input that is optimizer state."""
    return len(lifted.parameters) + len(lifted.handles) + len(lifted.buffers)


def _state_entries(lifted: Lifted) -> list[tuple[int, int, str]]:
    """Return the optimizer's number, the parameter's position and the key of each input that is optimizer state."""
    return [
        (number, position, key)
        for number, one in enumerate(lifted.optimizers)
        for position, key, value in one.state_entries()
        if isinstance(value, Tensor)
    ]


def _state_inputs(captured: Captured, lifted: Lifted) -> Iterator[tuple[tuple[int, int, str], fx.Node]]:
    """Yield each input that is optimizer state, with the optimizer's number, the parameter's position and the key."""
    given = captured.gm.graph.find_nodes(op="placeholder")
    yield from zip(_state_entries(lifted), given[_state_begins(lifted) :], strict=False)


def _feeds_only(node: fx.Node, begins: set[fx.Node]) -> bool:
    return node.op == "get_attr" and bool(node.users) and begins.issuperset(node.users)


def _same_call(
    gm: fx.GraphModule, node: fx.Node, other_gm: fx.GraphModule, other: fx.Node, same: dict[fx.Node, fx.Node | None]
) -> bool:
    if node.op == "placeholder":
        return node.target == other.target
    if node.op == "get_attr":
        one, two = getattr(gm, str(node.target)), getattr(other_gm, str(other.target))
        return one is two or (isinstance(one, Tensor) and isinstance(two, Tensor) and torch.equal(one, two))
    mapped = map_arg((node.args, node.kwargs), lambda argument: same.get(argument, argument))
    return node.target == other.target and mapped == (other.args, other.kwargs)
