"""`zgraph.training_step`: a decorator that runs a loop body as one graph."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import is_not
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zgraph.codegen.cuda_graph import CudaGraphs, RecordedSteps, Recorder
from zgraph.compiler.frame import Frame
from zgraph.compiler.graph_pass import PassContext
from zgraph.compiler.pass_list import PassList
from zgraph.driver.compile_frame import FrameCompiler
from zgraph.driver.garbage import rarely_collected
from zgraph.driver.options import CompileOptions
from zgraph.errors import ZgraphError
from zgraph.optimizers.local_step import step_on_shards
from zgraph.optimizers.muon import check_embeddings
from zgraph.passes import presets
from zgraph.passes.compress_gradients import CompressGradients
from zgraph.passes.quantize_gathers import QuantizeGathers
from zgraph.passes.step.interleave_micro_batches import InterleaveMicroBatches
from zgraph.runtime.exchanges.changes import hash_of
from zgraph.runtime.exchanges.steps import members_of, numbers_of, origin_of_parameter, shard_loaded_state
from zgraph.runtime.exchanges.watch import announcing
from zgraph.sharding.model.optional_in_steps import Reached
from zgraph.step import guards
from zgraph.step.capture import parameter_hooks
from zgraph.step.capture.capture import Captured, capture
from zgraph.step.capture.first_state import first_state, put_first_state, runs_alike, with_state
from zgraph.step.capture.lifted import Lifted, local, name_part
from zgraph.step.capture.option_inputs import OptionInputs
from zgraph.step.current import Current
from zgraph.step.judge import FIRST_CALLS, After, Before, tell
from zgraph.step.lines.refusals import check_function, check_optimizer
from zgraph.step.optional_modules import check_limit, check_options, tell_refusal, unite
from zgraph.step.outside.python_values import PythonValues
from zgraph.step.outside.variables import Outside
from zgraph.tiers.copy_lanes import lanes_of
from zgraph.torch_compat.dtensor import gradients_of
from zgraph.torch_compat.dynamo import never_compiled, without_compile
from zgraph.torch_compat.modules import tree_flatten

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger(__name__)
RECOMPILES = 8  # Dynamo's limit


def training_step(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    *,
    options: Mapping[str, Any] | None = None,
    recompile_limit: int = RECOMPILES,
) -> Callable[[Callable[P, R]], TrainingStep[P, R]]:
    """Run a training step, from forward to optimizer, as one graph.

        @zgraph.training_step(model, opt)
        def step(x, y):
            loss = model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            return loss.detach()

        loss = step(x, y)

    The decorated function computes the same as the plain one. zgraph traces it on fake tensors whenever a call needs a
    new graph, for example for new input shapes. Python side effects, such as counting or printing, happen only during a
    trace. The function must compute the same result from equal arguments at every call. Operations that a graph cannot
    represent are refused; the error message names the line.

    Args:
        model: a model sharded by `zgraph.shard`, compiled or not.
        optimizer: optimizer of the model's parameters; a list if the function steps several. Element-wise optimizers of
            torch.optim and Muon step on local shards, all others on DTensors. Float and tensor options, such as the
            learning rate, are inputs of the graph.
        options: options of `torch.compile(model, backend="zgraph")`, `{"cuda_graph": True}`, and `{"check": True}`,
            which compares the first calls with the undecorated function. `torch.optim.Muon` may step embeddings and
            output heads with `{"embeddings_by_muon": True}`.
        recompile_limit: maximum number of graphs; a call that needs another graph is refused.

    Returns:
        A decorator; `TrainingStep.function` is the plain function.

    Raises:
        ValueError: an option or an optimizer is not supported.
    """
    module = without_compile(model)
    parsed = CompileOptions.parse(options)
    optimizers = (optimizer,) if isinstance(optimizer, optim.Optimizer) else tuple(optimizer)
    for one in optimizers:
        check_optimizer(one)
        if type(one) is optim.Muon:
            if not parsed.embeddings_by_muon:
                check_embeddings(module, one)
            step_on_shards(one)  # plain lines then compute the same: on DTensors Muon rounds differently
    resting = Lifted.of(module, optimizers).resting
    if resting is not None and parsed.cuda_graph:
        raise ValueError(
            "zgraph.training_step: cuda_graph=True and a model with zgraph.Offload: at the end of each step the host "
            "waits for tensors copied to it, which cannot be recorded; leave out one of the two."
        )
    if parsed.check:
        _check_comparable(parsed.passes, offloads=resting is not None)
        parsed = replace(parsed, passes=presets.in_plain_order(parsed.passes))
    recorder = _recorder_of(module) if parsed.cuda_graph else None
    if resting is not None and resting.computes_elsewhere:
        for one in optimizers:
            resting.options.check_updates(one)

    def decorate(function: Callable[P, R]) -> TrainingStep[P, R]:
        check_function(function, optimizers)
        return TrainingStep(function, module, optimizers, parsed, recompile_limit, recorder)

    return decorate


def _recorder_of(model: nn.Module) -> Recorder:
    """Return an object that records and replays steps as CUDA graphs.

    Raises:
        ValueError: the model is not on a GPU.
    """
    devices = dict.fromkeys(parameter.device.type for parameter in model.parameters())
    if "cuda" not in devices or len(devices) > 1:
        raise ValueError(
            f"zgraph.training_step: cuda_graph=True needs a model on a GPU, and this one's parameters are on "
            f"{' and '.join(devices) or 'no device'}; move it before zgraph.shard, or leave out cuda_graph."
        )
    return CudaGraphs()


def _check_comparable(passes: PassList | None, *, offloads: bool) -> None:
    """Refuse `{"check": True}` if passes or offload options change the computed values.

    Raises:
        ValueError: a pass or an offload option is lossy.
    """
    entries = () if passes is None else passes.passes
    lossy = [entry.name for entry in entries if isinstance(entry, CompressGradients | QuantizeGathers)]
    lossy += [one.name for one in entries if isinstance(one, InterleaveMicroBatches) and one.when == "always"]
    what = f"the pass {lossy[0]}, which they do not have" if lossy else ""
    if offloads:
        what = "zgraph.Offload, whose state they would move as well"
    if what:
        raise ValueError(
            f'zgraph.training_step: options["check"] compares all bits with the plain lines, and there is {what}; '
            "check the step once without it, then leave out check."
        )


class _Ready(NamedTuple):
    """A captured step, and the Python values that it has read."""

    captured: Captured
    values: PythonValues


class TrainingStep(Generic[P, R]):
    """A training step that runs as one graph; made by `zgraph.training_step`.

    Attributes:
        function: the user's plain function, which may be called between steps.

    Args:
        recorder: recorder of CUDA graphs; None: each step runs operator by operator.
    """

    def __init__(
        self,
        function: Callable[P, R],
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        options: CompileOptions,
        recompile_limit: int,
        recorder: Recorder | None = None,
    ) -> None:
        functools.update_wrapper(cast(Any, self), function)
        self.function = function
        self._model, self._optimizers, self._options = model, optimizers, options
        self._limit, self._recorder = recompile_limit, recorder
        self._variants: list[guards.Variant] = []
        self._known: Current | None = None
        self._begun = 0
        self._states: list[Any] = []

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast(Any, self)._call(args, kwargs)

    @never_compiled
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, self._begun = self._begun, self._begun + 1
        if not self._options.is_checked(call, FIRST_CALLS):
            return self._run(args, kwargs, self._options.lowering)
        current = self._current()
        lifted, outside, device = current.lifted, self._outside(current), current.device
        before = Before(lifted, outside, device)
        try:
            with torch.compiler.set_stance("force_eager"):
                expected = After(lifted, outside, self.function(*args, **kwargs), device)
        finally:
            before.restore()
        result = self._run(args, kwargs, "fx")  # bitwise equal to the plain lines
        found = After(lifted, outside, result, device).difference(expected)
        tell(found, lifted, self.function, call)
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], lowering: str, ready: _Ready | None = None) -> Any:
        """Run one call of the step as a graph; capture and compile the graph if no earlier one is valid.

        `ready` is this call as `_make_state` has captured it already.
        """
        current = self._current()
        lifted = current.lifted
        leaves, tree = tree_flatten((list(args), kwargs))
        for scope in current.scopes:
            if scope.accumulation.opened:
                raise ZgraphError(
                    "zgraph.training_step: the step begins while a window of zgraph.no_sync is open; close the window "
                    "with a forward and backward outside no_sync first."
                )
            scope.check_batch(leaves)
        parameters = lifted.held
        has_gradient = tuple(map(is_not, gradients_of(parameters), repeat(None)))
        states = [one.state for one in self._optimizers]
        if len(self._states) != len(states) or any(map(is_not, self._states, states)):
            self._states = states
            for one in self._optimizers:
                shard_loaded_state(one)
        lifted.settle()
        state = current.state()
        options = OptionInputs.of(self._optimizers)
        outside = self._outside(current)
        tensors = [*lifted.tensors(state), *map(local, outside.tensors.values())]
        conditions = current.conditions(leaves, tree, options, outside, tensors)
        known = (one for one in reversed(self._others(lowering)) if one.holds(conditions, options, tensors))
        take = partial(self._capture, lifted, outside, args, kwargs)
        variant, ready = self._chosen(current, known, ready, partial(take, lowering), lowering)
        if variant is None:
            assert ready is not None
            united = ready.captured.united
            if ready.captured.effects.makes_state:
                later = self._make_state(ready, lifted, outside, args, kwargs, lowering)
                if later is not None:
                    return self._run(args, kwargs, lowering, later)  # on the state that there is now
                if lowering == "inductor":  # the step that makes state runs only once: Inductor would not pay off
                    lowering = "fx"
                    ready = take(lowering, united)
            variant = self._compile(current, conditions, options, outside, tensors, ready, lowering)
        # Numbers are sent with the graph's exchanges; tensors are not, so they are compared before anything is written.
        found = numbers_of(self._optimizers, of_tensors=True)
        members = hash(tuple(members_of(one)[0] for one in self._optimizers))
        for scope in current.scopes:
            for model in scope.models:
                model.changes.compare(members)
                if found:
                    model.meet("training_step", found)
        if any(has_gradient):
            variant.captured.effects.check_gradients(has_gradient)
            for parameter in parameters:
                parameter.grad = None
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = [*tensors, *options.values, *given]
        del state, tensors  # only the program may hold its inputs
        try:
            with torch.no_grad():
                outputs = list(variant.program(inputs))
        except BaseException:
            if lifted.resting is not None:  # started copies continue, and could overwrite tensors loaded next
                with contextlib.suppress(Exception):
                    lanes_of(lifted.resting.device).drain()
            raise
        state = [
            (value, origin_of_parameter(lifted.parameters[position].tensor))
            for position, _, value in lifted.state_entries()
            if isinstance(value, DTensor)
        ]
        is_changed = any(getattr(one, "digest", 0) for one in (*parameters, *(value for value, _ in state)))
        numbers = variant.captured.effects.numbers_in(outputs)
        detail = f" by the numbers {', '.join(map(str, numbers))}" if numbers else ""
        for scope in current.scopes:
            for model in scope.models:
                stepping = {id(one): one for one in parameters if is_changed}
                model.end_step(stepping=stepping, state=state, number=hash_of(numbers), detail=detail)
        result = variant.captured.effects.put(outputs, lifted)
        if variant.captured.effects.makes_state:
            lifted.settle()
        return result

    def _current(self) -> Current:
        """Return the facts about the model and its optimizers; compute them anew if tensors were replaced."""
        if self._known is None or not self._known.lifted.is_current():
            current = Current(self._model, self._optimizers)
            check_options(self._options, current.lifted)
            self._known = current
        return self._known

    def _chosen(
        self,
        current: Current,
        known: Iterator[guards.Variant],
        ready: _Ready | None,
        take: Callable[..., _Ready],
        lowering: str,
    ) -> tuple[guards.Variant | None, _Ready | None]:
        """Return the graph of a call, or else the captured step from which to make one.

        If ranks may skip modules, they first tell each other what they run: once in each call, and before any of them
        runs or compiles a graph, so it does not matter which of them have captured.

        Args:
            current: facts about the model.
            known: graphs that are valid for the call, if ranks run the same.
            ready: the step as captured in this call already, after ranks have told each other; None: not yet.
            take: function that captures the step; its argument is what any rank reaches, if that is known.
            lowering: lowering of the step.
        """
        variant, optional = next(known, None), current.optional
        is_full = bool(optional) and len(self._others(lowering)) >= self._limit
        if ready is not None:
            united, any_full = ready.captured.united, False
        else:
            try:
                ready = take() if variant is None else None
            except Exception:
                tell_refusal(optional)
                raise
            found = ready if variant is None else variant
            assert found is not None
            united, any_full = unite(optional, found.captured.reached, is_full=is_full)
        if variant is not None and variant.captured.united != united:
            variant = next((one for one in known if one.captured.united == united), None)
        if any_full:
            check_limit(optional, self._limit, lacks=is_full and variant is None)
        if variant is None and (ready is None or ready.captured.united != united):
            ready = take(united=united)
        return variant, ready

    def _others(self, lowering: str) -> list[guards.Variant]:
        """Return the graphs that a step with this lowering may run."""
        return [one for one in self._variants if one.lowering == lowering or one.captured.effects.makes_state]

    def _outside(self, current: Current) -> Outside:
        hooks = parameter_hooks.functions(current.lifted.held)
        return Outside.of(self.function, self._model, current.own, current.device, hooks)

    # --- compile ------------------------------------------------------------------------------------------------------

    @rarely_collected()
    def _capture(
        self,
        lifted: Lifted,
        outside: Outside,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lowering: str,
        united: Sequence[Reached] | None = None,
    ) -> _Ready:
        for one in lifted.optional():
            one.check_hooks()
        values = PythonValues([self.function, *parameter_hooks.functions(lifted.held)], [self._model])
        take = partial(capture, self.function, lifted, args, kwargs, outside, values=values)
        return _Ready(take(decompose=lowering == "inductor", united=united), values)

    def _make_state(
        self,
        first: _Ready,
        lifted: Lifted,
        outside: Outside,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lowering: str,
    ) -> _Ready | None:
        """Make the state that the first step would make, and return the step captured with it.

        None, with the state as it was, if the first step does more than make its state.
        """
        made = first_state(first.captured, lifted)
        if made is None:
            return None
        remove = put_first_state(made, lifted)
        known = with_state(first.captured, made, lifted)
        if known is not None:
            return first._replace(captured=known)
        later = None
        try:
            found = self._capture(lifted, outside, args, kwargs, lowering, first.captured.united)
            if runs_alike(first.captured, made, found.captured, lifted):
                later = found
        except Exception:  # as the plain loop's, it is the second step's error, which makes it again
            return None
        finally:
            if later is None:
                remove()
        return later

    def _compile(
        self,
        current: Current,
        conditions: guards.Conditions,
        inputs: OptionInputs,
        outside: Outside,
        tensors: list[Tensor],
        ready: _Ready,
        lowering: str,
    ) -> guards.Variant:
        lifted, captured, values = current.lifted, ready.captured, ready.values
        others = self._others(lowering)
        reason = guards.why_another(others, conditions, inputs, tensors)
        if len(others) >= self._limit:
            with announcing([param.handle for param in lifted.handles.values()]):  # to ranks that run a graph they have
                raise ZgraphError(
                    f"zgraph.training_step: {self._limit} graphs were made for different calls, the last time because "
                    f"of {reason}. Pass changing values as tensors and pad inputs to few shapes, or raise "
                    "recompile_limit."
                )
        if reason:
            _log.info("zgraph: step %s is compiled again: %s", self.function.__name__, reason)
        helpers = self._options.compile_helpers if lowering == "inductor" else None
        options = replace(self._options, lowering=lowering, compile_helpers=helpers)
        if lifted.resting is not None:
            options = replace(options, passes=presets.with_streams(options.passes))
        captured.effects.check_gradients([gradient is not None for gradient in gradients_of(lifted.held)])
        name = f"{name_part(self.function.__name__)}/{len(self._variants)}"
        frame = Frame(name=name, reason=reason, inputs=lifted.tensors(), is_step=True)
        recorder = None if captured.effects.makes_state else self._recorder  # the step that creates state runs once
        recorded = None if recorder is None else RecordedSteps(recorder, len(tensors))
        # Ranks that skip a module compute less, so they would plan differently by costs.
        known = PassContext(machine=None if lifted.optional() else frame.machine)
        if lifted.resting is not None:
            offload = lifted.resting.options
            known = replace(known, host_budget_bytes=offload.host_budget_bytes, update=offload.update)
        compiler = FrameCompiler(frame, options, known=known, on_plan=lifted.check_host)
        program = compiler.compile_step(captured.gm, recorded)
        variant = guards.Variant(conditions, captured, program, options.lowering, values.of_what_ran())
        self._variants.append(variant)
        return variant
