"""`zgraph.PipelineStage`: a pipeline stage whose micro-batches in one step form one accumulation window."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage

from zgraph.errors import ZgraphError
from zgraph.runtime.window_state import CLOSING, OPEN
from zgraph.sharding.pipeline.kept_parameters import keep_gathered, may_be_kept
from zgraph.sharding.pipeline.weight_backwards import WeightBackwards, edges_of, input_gradients, way_through
from zgraph.sharding.scope import Scope, ShardedParam, sharded_parameters, state_of
from zgraph.torch_compat.autograd import is_compiled
from zgraph.torch_compat.dynamo import without_compile
from zgraph.torch_compat.groups import NoMessageToItself, kept_of_forward


class PipelineStage(NoMessageToItself, TorchStage):
    """A stage of `torch.distributed.pipelining` whose module was sharded by `zgraph.shard`, compiled or not.

    Replaces torch's class; schedules are torch's:

        stage = zgraph.PipelineStage(torch.compile(chunk, backend="zgraph"), index, count, device, group=group)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    All micro-batches of a `schedule.step` form one accumulation window, as if all forwards but one had run under
    `zgraph.no_sync`. At ZeRO stages 0 and 1 gradients are reduced once per step, in the last backward. At stages 1 and
    2 parameters are gathered once per step. At stage 3 each micro-batch reduces its gradients, and gathers all
    parameters not kept by `keep_bytes`. A step inside `zgraph.no_sync` leaves the window open for the next step.

    Schedules that split a backward into two halves, for inputs and for weights, are supported. A compiled backward is
    split into two graphs; the second has the reductions. A backward cannot be split with tensor parallelism, with
    parameters read outside compiled code, or if the module was compiled before the stage was created. Then the whole
    backward runs when the schedule requests the gradients of inputs, and the half for weights is empty, which is
    correct but does not fill the bubble.

    Args:
        submodule, stage_index, num_stages, device: as for torch's `PipelineStage`.
        closes: the micro-batch whose backward is the last of a step: "last", or "first" for `ScheduleLoopedBFS`. With
            "first", ZeRO stages 1 and 2 gather twice per step.
        keep_bytes: at ZeRO stage 3: bytes of gathered parameters that may be kept from a step's first forward to its
            last backward. Parameters that fit, in the module's order, are gathered once per step, as at stage 2; each
            micro-batch gathers the rest. `plan.pipeline.stages[index].keep_bytes` of `zgraph.plan` is the number of
            bytes that a budget allows.
        options: further arguments of torch's `PipelineStage`, such as `group`.

    Raises:
        ValueError: a `dw_builder` is given, `closes` is unknown, `keep_bytes` is not a number of bytes, or it is given
            without parameters at ZeRO stage 3.
        ZgraphError: from `schedule.step`, if the last backward is not that of the micro-batch in `closes`; from
            `optimizer.step()`, if the schedule's step has failed.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        closes: Literal["last", "first"] = "last",
        keep_bytes: int = 0,
        **options: Any,
    ) -> None:
        if options.get("dw_builder") is not None:
            raise ValueError(
                "zgraph.PipelineStage: a dw_builder computes gradients of weights outside autograd, where zgraph does "
                "not reduce them; leave it out."
            )
        if closes not in ("last", "first"):
            raise ValueError(f"zgraph.PipelineStage: closes={closes!r}; use 'last', or 'first' for ScheduleLoopedBFS.")
        # torch also runs the module once to infer shapes, which need not be compiled, and reads its parameters.
        module = without_compile(submodule)
        super().__init__(module, stage_index, num_stages, device, **options)
        self._runs = submodule
        self._closes_first = closes == "first"
        states = (state_of(part) for part in module.modules())
        self._scopes: list[Scope] = list(dict.fromkeys(state.scope for state in states if state is not None))
        self._params = list(sharded_parameters(module).values())
        skippable = next((param.name for param in self._params if param.spec.is_optional), None)
        if skippable is not None:
            raise ValueError(
                f"zgraph.PipelineStage: {skippable} is optional, which is not supported in pipelines; leave optional "
                "out of zgraph.shard, and run the module on all ranks."
            )
        if any(scope.context is not None for scope in self._scopes):
            raise ValueError(
                "zgraph.PipelineStage: the stage has a context axis, which is not supported in pipelines; leave "
                "context out of zgraph.shard."
            )
        _check_keep_bytes(self._params, keep_bytes)
        keep_gathered(self._params, keep_bytes)
        self._windows = [scope for scope in self._scopes if scope.has_windows]
        self._is_open = False  # a step has begun, and its last backward has not ended
        self._done = 0  # backwards of this step that have reached the weights
        self._whole: set[int] = set()  # micro-batches whose backward was not split
        self._splits_compiled = _are_plain_shards(module, self._params)
        self._splitting: dict[int, int] = {}  # number of compiled backwards of each micro-batch that can be split
        self._left: WeightBackwards | None = None  # set while a compiled backward of inputs runs
        for scope in self._scopes:
            scope.is_staged = True
        # Checked with the first micro-batch: the run for shapes reads uninitialised memory.
        self._checks = [one for scope in self._scopes if (one := scope.same_batch) is not None and one.is_due]
        for check in self._checks:
            check.is_due = False

    def clear_runtime_states(self) -> None:
        """Begin a step; release parameters that a failed step has left gathered."""
        super().clear_runtime_states()
        if self._is_open:
            self._release()
        self._is_open, self._done = False, 0
        self._whole.clear()
        self._stop_splitting()

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on a micro-batch."""
        return self._runs(*args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch, after setting its window position."""
        position = self._position(fwd_chunk_id)
        self._is_open = position is not None
        for check in self._checks:
            check.is_due = True
        self._checks.clear()
        for scope in self._windows:
            scope.given = position
            scope.accumulation.opened = scope.accumulation.opened or position == OPEN
        before = sum(scope.splitting_forwards for scope in self._scopes)
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self._splitting[fwd_chunk_id] = sum(scope.splitting_forwards for scope in self._scopes) - before
            for scope in self._windows:
                scope.given = None
            if self._closes_first and fwd_chunk_id + 1 == self.chunks and not self._is_held_open():
                self._release()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a micro-batch, or only the half for the inputs if requested and possible."""
        outputs, inputs = kept_of_forward(self, bwd_chunk_id) if self.has_backward else ((), ())
        if full_backward or self.is_first or not _any_compiled(outputs):
            with self._backward_of(bwd_chunk_id) if full_backward else contextlib.nullcontext():
                super().backward_one_chunk(
                    bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
                )
            return
        way = way_through(outputs, inputs) if self._splits_compiled else None
        del outputs, inputs  # held no longer than torch's stage holds them
        if way is None or len(way.readers) != self._splitting[bwd_chunk_id]:
            self._whole.add(bwd_chunk_id)
            with self._backward_of(bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=last_backward)
            return
        self._left = left = WeightBackwards(way)
        for param in self._params:
            param.state.defer = left.add
        try:
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=False, last_backward=last_backward)
        finally:
            self._stop_splitting()
        assert left.is_complete

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Run one part of a backward: "full", "input" or "weight".

        Compiled modules defer the part "weight" to `WeightBackwards`.
        """
        if backward_type == "input" and self._left is not None:
            outputs, grads, inputs = (bwd_kwargs[key] for key in ("stage_output", "output_grads", "input_values"))
            return input_gradients(outputs, grads, inputs), self._left
        left = bwd_kwargs.get("param_groups")
        if backward_type == "weight" and isinstance(left, WeightBackwards):
            left.run(self.device.type)
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _stop_splitting(self) -> None:
        self._left = None
        for param in self._params:
            param.state.defer = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the half of a micro-batch's backward for the weights, unless the whole backward has already run."""
        if bwd_chunk_id in self._whole:
            return
        for scope in self._scopes:
            scope.accumulation.adds_returned = True
        try:
            with self._backward_of(bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        finally:
            for scope in self._scopes:
                scope.accumulation.adds_returned = False

    def _position(self, chunk: int) -> str | None:
        """Return a micro-batch's window position; None if the step has one micro-batch, or no backward."""
        if not self.has_backward or self.chunks is None or self.chunks < 2:
            return None
        return CLOSING if chunk == (0 if self._closes_first else self.chunks - 1) else OPEN

    def _is_held_open(self) -> bool:
        return any(scope.accumulating for scope in self._windows)

    @contextlib.contextmanager
    def _backward_of(self, chunk: int) -> Generator[None]:
        """Context manager for a backward that computes gradients of weights; a step's last one closes the window."""
        if not self.has_backward:
            yield
            return
        self._done += 1
        last, position = self._done == self.chunks, self._position(chunk)
        if self._windows and position == (OPEN if last else CLOSING):
            raise self._wrong_order(chunk)
        before = [scope.accumulating for scope in self._scopes]
        for scope, held_open in zip(self._scopes, before, strict=True):
            scope.accumulating = held_open or not last  # read in backward by error feedback at stage 3
            if position is not None:
                scope.last = OPEN if held_open else position  # for forwards that activation checkpointing repeats
        try:
            yield
        finally:
            for scope, held_open in zip(self._scopes, before, strict=True):
                scope.accumulating = held_open
        if last:
            self._is_open = False
            for scope, held_open in zip(self._scopes, before, strict=True):
                if not held_open:
                    scope.accumulation.settle()

    def _wrong_order(self, chunk: int) -> ZgraphError:
        asked, other = ("first", "last") if self._closes_first else ("last", "first")
        return ZgraphError(
            f"zgraph.PipelineStage: stage {self.stage_index} must close its window with the {asked} micro-batch, but "
            f"the schedule runs backward {self._done} of {self.chunks} for micro-batch {chunk}. Pass closes={other!r} "
            "if the schedule runs backwards in the opposite order, as ScheduleLoopedBFS does; ZeRO stage 3 allows any "
            "order."
        )

    def _release(self) -> None:
        for param in self._params:
            param.state.release()


def _check_keep_bytes(params: Iterable[ShardedParam], keep_bytes: object) -> None:
    if keep_bytes is None:
        raise ValueError(
            "zgraph.PipelineStage: keep_bytes=None, as in a plan that was made without a budget; give the plan a "
            "target with budget_bytes, or write a number of bytes, 0 to keep nothing."
        )
    if isinstance(keep_bytes, bool) or not isinstance(keep_bytes, int | float) or not keep_bytes >= 0:
        raise ValueError(
            f"zgraph.PipelineStage: keep_bytes={keep_bytes!r}; use a positive number of bytes, or 0 to keep nothing. "
            "How many a budget allows depends on the schedule; zgraph.plan says it: "
            "plan.pipeline.stages[index].keep_bytes."
        )
    if keep_bytes and not may_be_kept(params):
        raise ValueError(
            f"zgraph.PipelineStage: keep_bytes={keep_bytes}, and no parameter is at stage 3; leave it out: stages 1 "
            "and 2 keep all gathered parameters, and stage 0 gathers nothing."
        )


def _are_plain_shards(module: nn.Module, params: Iterable[ShardedParam]) -> bool:
    """Return whether zgraph shards all parameters and none is tensor-parallel, so that graphs read plain tensors."""
    sharded = {id(param.sharded) for param in params if param.spec.split is None}
    return all(id(parameter) in sharded for parameter in module.parameters())


def _any_compiled(outputs: Iterable[Any]) -> bool:
    """Return whether the backward of any output passes through a compiled function."""
    waiting = [edge.node for edge in edges_of(outputs)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if is_compiled(node):
            return True
        following = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(following)
        waiting += following
    return False
