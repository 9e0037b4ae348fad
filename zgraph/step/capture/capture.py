"""Capture of a training step: the function runs once on fake values, and its operators become one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, optim
from torch.distributed.tensor import DTensor

from zgraph.analysis.liveness import placements
from zgraph.errors import ZgraphError
from zgraph.graph import meta, nodes
from zgraph.optimizers.gradients import GradScaler
from zgraph.sharding.model.optional_in_steps import Reached, TracedReductions
from zgraph.step.capture.clean import clean, number_parts
from zgraph.step.capture.lifted import Lifted, local, name_part, overlapping
from zgraph.step.capture.option_inputs import Assumed, OptionInputs, names_of
from zgraph.step.capture.outputs import (
    Bound,
    Gradient,
    NewState,
    Output,
    OwnNumber,
    Returned,
    SkipFlag,
    ToldFlag,
    put_all,
    values_of,
)
from zgraph.step.capture.stand_ins import StandIns
from zgraph.step.capture.windows import resolve_windows
from zgraph.step.lines.own_numbers import return_own_numbers
from zgraph.step.lines.redirect import Redirect
from zgraph.step.lines.refusals import line_of, only_given
from zgraph.step.lines.watch import Watch
from zgraph.step.outside.places import Binding
from zgraph.step.outside.python_values import PythonValues
from zgraph.step.outside.random_numbers import same_random_numbers
from zgraph.step.outside.traced import holds_traced, is_traced
from zgraph.step.outside.variables import Outside
from zgraph.tiers.tier import DEVICE, Tier
from zgraph.torch_compat.aot import trace
from zgraph.torch_compat.autograd import steps_decided_by
from zgraph.torch_compat.dtensor import local_of, mixes_dtensors
from zgraph.torch_compat.dynamo import inline_compiled
from zgraph.torch_compat.fake_values import (
    NumberGuards,
    data_dependent_errors,
    fake_number,
    fake_of,
    step_mode,
)
from zgraph.torch_compat.modules import note_step, tree_flatten, tree_unflatten


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Everything that a step returns and changes, known once its function has run on fake values.

    Attributes:
        outputs: kind and target of each output of the graph.
        leaves: leaves of the function's return value that the graph does not compute, by index.
        tree: pytree spec of the return value.
        constants: new entries of optimizer state that are not tensors, each as (index of the optimizer, index of the
            parameter, key, value).
        cleared: indices of parameters whose gradients the step sets to None before it uses them.
        steps: indices of the optimizers that step.
        keeps_state: whether lines of the step put entries into an optimizer's state.
    """

    outputs: tuple[Output, ...]
    leaves: Mapping[int, Any]
    tree: Any
    constants: tuple[tuple[int, int, str, Any], ...]
    cleared: frozenset[int]
    steps: tuple[int, ...]
    keeps_state: bool

    @property
    def makes_state(self) -> bool:
        """Whether the step adds tensors to the optimizers' state, as the first step of most optimizers does."""
        return any(isinstance(output, NewState) for output in self.outputs)

    def put(self, values: Sequence[Any], lifted: Lifted) -> Any:
        """Assign a call's outputs to gradients, state and attributes, and return the function's return value."""
        left = put_all(self.outputs, values, lifted)
        for number, position, key, constant in self.constants:
            left.set_state(number, position, key, constant)
        for number in self.steps:
            note_step(lifted.optimizers[number].optimizer)
        leaves = {**self.leaves, **left.leaves}
        return tree_unflatten([leaves[place] for place in range(len(leaves))], self.tree)

    def numbers_in(self, values: Sequence[Any]) -> list[float]:
        """Return the `OwnNumber` values among the outputs of a call, which the ranks compare."""
        return [float(value) for _, value in values_of(OwnNumber, self.outputs, values)]

    def check_gradients(self, has_gradient: Sequence[bool]) -> None:
        """Refuse `.grad` values from before the step, unless the step sets them to None before it uses them."""
        if any(has and position not in self.cleared for position, has in enumerate(has_gradient)):
            raise ZgraphError(
                "zgraph.training_step: parameters have gradients from before the step, to which it would add; call the "
                "model's zero_grad() before the step, or first in it."
            )


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A step as a graph.

    Attributes:
        gm: the graph. Inputs are the tensors of `Lifted.tensors`, tensors from outside, the options of `OptionInputs`,
            and the tensors of the arguments. The graph writes to shards, buffers, state and tensors from outside.
        effects: what the graph's outputs are, and what else the step returns and changes.
        assumed: assumptions of the graph about numbers, such as options, on which Python branched.
        reached: which optional parameters this rank's backwards reach, for each call of `zgraph.shard` that has some.
        united: the same for any rank: the parameters whose gradients the graph reduces.
    """

    gm: fx.GraphModule
    effects: Effects
    assumed: Assumed
    reached: tuple[Reached, ...] = ()
    united: tuple[Reached, ...] = ()


def capture(
    function: Callable[..., Any],
    lifted: Lifted,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outside: Outside | None = None,
    *,
    values: PythonValues | None = None,
    decompose: bool = False,
    united: Sequence[Reached] | None = None,
) -> Captured:
    """Run a step on fake values and return it as a graph; model, optimizers and arguments are unchanged afterwards.

    Args:
        function: the user's function.
        lifted: its model and optimizers.
        args, kwargs: arguments of the call; tensors and numbers in lists, tuples and dicts.
        outside: variables that the function reads from outside; it may also write to tensors among them.
        values: Python values that the function may read.
        decompose: whether to decompose operators for Inductor.
        united: `Captured.united`; None if ranks have not told each other: then what this rank reaches.

    Raises:
        ZgraphError: a graph cannot represent something the function does; the message says where, and what to write.
    """
    outside = outside or Outside([], [], {})
    values = values or PythonValues([function], [lifted.model])
    tracer = _Tracer(function, lifted, args, kwargs, outside, values, united)
    try:
        try:
            captured = tracer.trace(decompose)
        except data_dependent_errors():
            values.effects()  # undoes the changes of the first attempt
            # Optimizers such as RAdam branch on the step count, which then becomes a guard, checked before each call.
            tracer = _Tracer(function, lifted, args, kwargs, outside, values, united, asks=True)
            captured = tracer.trace(decompose)
    except data_dependent_errors() as error:
        reader = tracer.watch.reader
        raise ZgraphError(
            f"zgraph.training_step: {line_of(error) or 'the step'}{f', in {_kind(reader)}.step(),' if reader else ''} "
            "decides in Python by a value that is known only when the step runs; choose with torch.where, or do it "
            f"outside the step{f' (optimizers other than {_kind(reader)} may not need this)' if reader else ''}."
        ) from error
    except RuntimeError as error:
        if not mixes_dtensors(error):
            raise
        raise ZgraphError(
            f"zgraph.training_step: {line_of(error) or 'the step'}: {error} Outside its model's forward a parameter is "
            "a DTensor: read parameter.full_tensor(), whose gradient is reduced as in forward."
        ) from error
    finally:
        values.effects()
    number_parts(captured.gm.graph)
    resolve_windows(captured.gm.graph, _optional_handles(captured.gm.graph, lifted))
    captured.gm.recompile()
    return tracer.with_own_numbers(captured)


def _kind(optimizer: object) -> str:
    return type(optimizer).__name__


def _tag_resting(graph: fx.Graph, lifted: Lifted, inputs: Sequence[Tensor], spaces: Sequence[Tier]) -> None:
    """Record the memory space of each input that is offloaded to the host or to disk."""
    given, places = graph.find_nodes(op="placeholder"), lifted.places()
    for number, (node, space) in enumerate(zip(given, spaces, strict=False)):
        if space != DEVICE:
            meta.set_space(node, space)
            place = places[number] if number < len(places) else None
            if place is not None:
                meta.set_longest_bytes(node, lifted.longest_bytes(place, inputs[number]))


def _tag_kept(graph: fx.Graph, lifted: Lifted) -> None:
    """Mark the inputs that are parameters, buffers or optimizer state, which persist between steps."""
    state = sum(isinstance(value, Tensor) for _, _, value in lifted.state_entries())
    handles = range(len(lifted.parameters), len(lifted.parameters) + len(lifted.handles))
    given = graph.find_nodes(op="placeholder")[: handles.stop + len(lifted.buffers) + state]
    for number, node in enumerate(given):
        if number not in handles:
            meta.set_kept(node, "parameters" if number < len(given) - state else "state")


def _optional_handles(graph: fx.Graph, lifted: Lifted) -> set[fx.Node]:
    given = graph.find_nodes(op="placeholder")[len(lifted.parameters) :]
    return {node for node, param in zip(given, lifted.handles.values(), strict=False) if param.spec.is_optional}


def _tag_new_state(graph: fx.Graph, outputs: Sequence[Output], lifted: Lifted) -> None:
    """Mark nodes that allocate new optimizer state, with the memory space that stores the state after the step."""
    found = placements(graph)
    resting = lifted.resting
    rests_in = resting.options.optimizer_tier if resting is not None else None
    for output, node in values_of(NewState, outputs, nodes.returned_by(graph)):
        value = meta.tensor_value(node)
        for number in found.lies_in[node]:
            first = found.storages[number].first
            meta.tag_at_rest(first)
            if first.op == "call_function":
                meta.set_kept(first, "state")
            if rests_in is not None and value.ndim and first.op == "call_function":
                meta.set_rest(first, rests_in)
                meta.set_longest_bytes(first, lifted.longest_bytes(output.position, value))


class _Tracer:
    """Traces a step once, and records its inputs and outputs."""

    def __init__(
        self,
        function: Callable[..., Any],
        lifted: Lifted,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outside: Outside,
        values: PythonValues,
        united: Sequence[Reached] | None,
        *,
        asks: bool = False,
    ) -> None:
        self.function, self.lifted, self.outside = function, lifted, outside
        self.values, self.bindings = values, list[Binding]()
        self.optional = lifted.optional()
        self.united = [None] * len(self.optional) if united is None else united
        self.reductions: list[TracedReductions] = []
        self.shared: set[int] = set()
        self.present: list[Tensor] = []
        self.told: list[tuple[GradScaler, optim.Optimizer, list[Tensor]]] = []
        self.leaves, self.tree = tree_flatten((list(args), dict(kwargs)))
        self.mode = step_mode()
        self.watch = Watch(self.mode, asks, {id(part): path for path, part in lifted.model.named_modules()})
        self.optimizers = [one.optimizer for one in lifted.optimizers]
        self.options = OptionInputs.of(self.optimizers)
        self.effects: Effects | None = None  # until the function has run

    def trace(self, decompose: bool) -> Captured:
        inputs = [*self.lifted.tensors(), *map(local, self.outside.tensors.values())]
        spaces = self.lifted.spaces(inputs, self.outside.tensors.values())
        # An input that shares memory with another is refused if used: writes to one would not show in the other.
        self.present = inputs
        self.shared = overlapping(inputs) if self.outside.tensors else set()
        given = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        options, option_names = self.options.values, names_of(self.optimizers)
        numbers = {
            name: fake_number(self.mode, value, name)
            for name, value in zip(option_names, options, strict=True)
            if isinstance(value, float)
        }
        fakes: list[Any] = self._fakes_of(inputs, spaces)
        fakes += [
            fake_of(self.mode, value) if isinstance(value, Tensor) else numbers[name]
            for name, value in zip(option_names, options, strict=True)
        ]
        fakes += [fake_of(self.mode, tensor) for tensor in given]
        names = [
            *self.lifted.names(),
            *self.outside.tensors,
            *option_names,
            *(f"input_{number}" for number in range(len(given))),
        ]
        gm = trace(self._run, fakes, self.mode, decompose=decompose)
        known = self.watch.known
        guards = NumberGuards(self.mode, numbers | known.numbers)
        assumed = Assumed(guards, option_names, options, known.read)
        gm = clean(gm, [name_part(name) for name in names])
        _tag_resting(gm.graph, self.lifted, inputs, spaces)
        _tag_kept(gm.graph, self.lifted)
        assert self.effects is not None, "the trace has run the function"
        reached = tuple(one.reached for one in self.reductions)
        united = tuple(of_rank if any_ is None else any_ for of_rank, any_ in zip(reached, self.united, strict=True))
        return Captured(gm=gm, effects=self.effects, assumed=assumed, reached=reached, united=united)

    def _fakes_of(self, inputs: Sequence[Tensor], spaces: Sequence[Tier]) -> list[Any]:
        """Return a fake tensor for each input. Tensors that a GPU model offloads get fake tensors on the GPU."""
        resting = self.lifted.resting
        if resting is None or not resting.computes_elsewhere:
            return [fake_of(self.mode, tensor) for tensor in inputs]
        return [
            fake_of(self.mode, tensor, None if space == DEVICE else resting.device)
            for tensor, space in zip(inputs, spaces, strict=True)
        ]

    def _run(self, *inputs: Any) -> list[Any]:
        given = iter(inputs)
        held = [next(given) for _ in self.lifted.tensors()]
        every = [(tensor, next(given)) for tensor in self.outside.tensors.values()]
        outside = [pair for place, pair in enumerate(every) if len(held) + place not in self.shared]
        options = [next(given) for _ in self.options.values]
        self.watch.known.begin(self.present, [*held, *(traced for _, traced in every)])
        stand_ins = StandIns.of(self.lifted, self.watch, held, options, outside)
        self.watch.stand_ins = stand_ins.by_id()
        self.watch.gathered.names = {id(handle): param.name for param, handle in stand_ins.handles.items()}
        scopes = self.lifted.scopes()
        self.watch.accumulates = lambda: any(scope.accumulating for scope in scopes)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        redirect = Redirect(self.watch, stand_ins.note_reading)
        with contextlib.ExitStack() as stack:
            stack.enter_context(inline_compiled())
            stack.enter_context(only_given(self.optimizers))
            for scaler in self.outside.scalers:
                stack.enter_context(self._scaling(scaler, stand_ins))
            stack.enter_context(stand_ins.in_place(redirect))
            self.reductions = [
                stack.enter_context(one.traced(stand_ins.handle_of, united))
                for one, united in zip(self.optional, self.united, strict=True)
            ]
            stack.enter_context(same_random_numbers())
            stack.enter_context(self.watch)
            stack.enter_context(redirect)
            stack.enter_context(self.values.calls.noted())
            result = self.function(*args, **kwargs)
        self.bindings, changed = self.values.effects()
        if changed:
            raise ZgraphError(f"zgraph.training_step: the step changes a value of Python, {changed}.")
        return self._outputs(result, stand_ins)

    @contextlib.contextmanager
    def _scaling(self, scaler: torch.amp.GradScaler, stand_ins: StandIns) -> Generator[None]:
        """Make the graph, not Python, decide whether the GradScaler skips an optimizer's step.

        Models are told of the decision after the graph has run.
        """
        pending: list[Any] = []
        if isinstance(scaler, GradScaler):
            scaler.defer = lambda found: self.told.extend((scaler, *entry) for entry in found)
            pending, scaler.found = scaler.found, []
        try:
            with steps_decided_by(scaler, stand_ins.step_unless):
                yield
        except RuntimeError as error:
            if isinstance(error, (ZgraphError, *data_dependent_errors())):
                raise
            raise ZgraphError(
                f"zgraph.training_step: {line_of(error) or 'the step'} and its GradScaler: {error}; write "
                "scaler.step(optimizer) and scaler.update() into the step."
            ) from error
        finally:
            if isinstance(scaler, GradScaler):
                scaler.defer, scaler.found = None, pending

    def _outputs(self, result: Any, stand_ins: StandIns) -> list[Any]:
        """Return the values that the graph must output, and record the kind of each in `self.effects`.

        Kinds are results, new optimizer state, gradients, tensors bound to attributes, and flags of skipped steps.
        """
        found, tree = tree_flatten(result)
        leaves: list[Any] = [self.watch.stand_ins.get(id(leaf), leaf) for leaf in found]
        pairs: list[tuple[Output, Any]] = []
        known: dict[int, Any] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.SymFloat):  # an option of the optimizer, or computed from options
                pairs.append((Returned(place, None), leaf))
            elif not isinstance(leaf, Tensor):
                if holds_traced(leaf):
                    raise ZgraphError(
                        f"zgraph.training_step: the step returns a {type(leaf).__name__} that holds tensors, which a "
                        "graph cannot make; return tensors, alone or in tuples, lists, dicts or named tuples."
                    )
                known[place] = leaf
            elif not is_traced(leaf):
                raise ZgraphError(
                    "zgraph.training_step: the step returns a tensor that it has not computed; return one it computes."
                )
            else:
                pairs.append((Returned(place, _like(leaf)), _part(leaf)))
        optimizers = list(enumerate(stand_ins.optimizers))
        constants: list[tuple[int, int, str, Any]] = []
        for number, position, key, value in stand_ins.new_state():
            if isinstance(value, Tensor):
                like = stand_ins.optimizers[number].layout_of(position, key, value)
                pairs.append((NewState(number, position, key, like), _part(value)))
            else:
                constants.append((number, position, key, value))
        grads = [(position, parameter.grad) for position, parameter in enumerate(stand_ins.parameters)]
        pairs += [(Gradient(position), _part(grad)) for position, grad in grads if grad is not None]
        for one in self.bindings:
            value = self.watch.stand_ins.get(id(one.tensor), one.tensor)
            pairs.append((Bound(one, _like(value)), _part(value)))
        for scaler, optimizer, flags in self.told:
            pairs += [(ToldFlag(scaler, optimizer), flag.detach()) for flag in flags]
        pairs += [(SkipFlag(number), one.skip) for number, one in optimizers if one.skip is not None]
        self.effects = Effects(
            outputs=tuple(output for output, _ in pairs),
            leaves=known,
            tree=tree,
            constants=tuple(constants),
            cleared=frozenset(stand_ins.cleared),
            steps=tuple(number for number, one in optimizers if one.stepped),
            keeps_state=any(one.keeps_state for one in stand_ins.optimizers),
        )
        return [value for _, value in pairs]

    def with_own_numbers(self, captured: Captured) -> Captured:
        """Return the step with outputs for the ranks' own numbers; its parts are numbered and its windows resolved."""
        gm, outputs = captured.gm, captured.effects.outputs
        outputs += (OwnNumber(),) * self._own_numbers(gm, outputs)
        _tag_new_state(gm.graph, outputs, self.lifted)
        return replace(captured, effects=replace(captured.effects, outputs=outputs))

    def _own_numbers(self, gm: fx.GraphModule, outputs: Sequence[Output]) -> int:
        given = gm.graph.find_nodes(op="placeholder")
        begin = len(self.lifted.parameters)
        buffers = begin + len(self.lifted.handles)
        state, outside = buffers + len(self.lifted.buffers), len(self.lifted.tensors())
        options = outside + len(self.outside.tensors)
        arguments = options + len(self.options.values)
        of_rank = [*given[buffers:state], *given[outside:options], *given[arguments:]]
        returned = zip(outputs, nodes.returned_by(gm.graph), strict=True)
        left = [node for output, node in returned if isinstance(output, NewState | Gradient)]
        found = return_own_numbers(gm.graph, of_rank, [*given[:begin], *given[state:outside]], left)
        gm.recompile()
        return found


def _part(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached."""
    return (local_of(value) if isinstance(value, DTensor) else value).detach()


def _like(value: Tensor) -> DTensor | None:
    return value if isinstance(value, DTensor) else None
