"""Splits a joint graph into forward and backward by torch's partitioner, with support for recomputed random operators.

If activation checkpointing recomputes a random operator, torch wraps it, so that backward draws with forward's
generator state. Forward returns the state, and backward receives it as an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph.graph import meta, nodes, traits
from zgraph.graph.sizes import size_hint
from zgraph.torch_compat.aot import may_be_written, min_cut_partition, rng_state_operators
from zgraph.torch_compat.operators import OpOverload


@dataclass(frozen=True)
class JointSplit:
    """Splits a joint graph into forward and backward. Passes may try it on copies of the graph.

    Attributes:
        inputs, options: arguments that AOTAutograd passes to a partitioner.
        timed: makes a context in which splits are timed separately from the pass that tries them.
    """

    inputs: Any
    options: Mapping[str, Any]
    timed: Callable[[], AbstractContextManager[None]] = nullcontext

    def of(self, joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph, tagged by passes, into forward and backward by torch's min-cut partitioner.

        Differs from torch's partitioner in three ways: attention without dropout counts as not random, forward's
        outputs are in the order in which AOTAutograd reads them, and every node has its fake value. Like torch's
        partitioner, this changes the joint graph.
        """
        with self.timed():
            _hide_zero_dropout(joint.graph)
            forward, backward = min_cut_partition(joint, self.inputs, **self.options)
            for gm in (joint, forward, backward):
                _restore_zero_dropout(gm)
            _settle_states(forward, backward, self.options["num_fwd_outputs"])
            return forward, backward


# --- attention without dropout ----------------------------------------------------------------------------------------


def zero_dropout(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Placeholder for an operator that is tagged as random but draws nothing, used while a joint graph is split."""
    return operator(*args, **kwargs)


def _hide_zero_dropout(graph: fx.Graph) -> None:
    for node in nodes.call_functions(graph, traits.has_zero_dropout):
        node.args = (cast(OpOverload, node.target), *node.args)
        node.target = zero_dropout


def _restore_zero_dropout(gm: fx.GraphModule) -> None:
    found = list(nodes.call_functions(gm.graph, lambda node: node.target is zero_dropout))
    for node in found:
        operator, *args = node.args
        assert isinstance(operator, OpOverload)
        node.target, node.args = operator, tuple(args)
    if found:
        gm.recompile()


# --- states of generators ---------------------------------------------------------------------------------------------


def _settle_states(forward: fx.GraphModule, backward: fx.GraphModule, user_outputs: int) -> None:
    """Give wrapped random operators their fake values, and put generator states where AOTAutograd expects tensors.

    AOTAutograd expects forward's outputs in this order: the user's, tensors, tensors that may have been written to,
    other objects (a device mesh), symbolic sizes. torch 2.11 - 2.15 put states just before the sizes.
    """
    save, run = rng_state_operators()
    taken = {str(node.args[0]): node for node in nodes.call_functions(backward.graph, lambda node: node.target is run)}
    # In the order of forward's outputs.
    received = [node for node in backward.graph.find_nodes(op="placeholder") if node.name in taken]
    outputs = nodes.returned_by(forward.graph)
    states = [node for node in outputs[user_outputs:] if _is_state(node, save)]
    for state, state_input in zip(states, received, strict=True):
        (wrapped,) = state.all_input_nodes
        (found,) = [user for user in wrapped.users if user is not state]
        # torch gives them a symbolic size that is not bound anywhere.
        value = meta.tensor_value(state)
        value = value.new_empty([size_hint(size) for size in value.shape])
        for node in (state, state_input):
            meta.set_value(node, value)
        meta.set_value(wrapped, (value, meta.value(found)))
        meta.set_value(taken[state_input.name], meta.value(found))
    saved = [node for node in outputs[user_outputs:] if node not in states]
    plain = next((place for place, node in enumerate(saved) if not _is_plain(node)), len(saved))
    behind = [node for node in saved[plain:] if not _is_size(node)]
    if not states or not behind:
        return
    nodes.output_of(forward.graph).args = ((*outputs[:user_outputs], *saved[:plain], *states, *saved[plain:]),)
    (place,) = [node for node in backward.graph.find_nodes(op="placeholder") if node.name == behind[0].name]
    for state_input in received:
        place.prepend(state_input)
    for gm in (forward, backward):
        gm.recompile()


def _is_state(node: object, save: object) -> bool:
    if not isinstance(node, fx.Node) or not nodes.is_getitem(node):
        return False
    source, place = node.args
    return isinstance(source, fx.Node) and source.target is save and isinstance(place, int) and place == 0


def _is_size(node: fx.Node) -> bool:
    return isinstance(meta.value(node), torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_plain(node: fx.Node) -> bool:
    """Return whether a saved node is a tensor that cannot be written to before backward reads it."""
    return isinstance(meta.value(node), Tensor) and not may_be_written(node)
