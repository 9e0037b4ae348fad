"""Runs a whole training step as a CUDA graph: recorded once, then replayed by one host call per step.

    call 1, 2, 3    warm-up: the program runs on a stream of its own, which initialises kernels and communicators
    call 4          the program is recorded without being run, and the recording is replayed
    call 5, ...     arguments are copied to fixed addresses, and the recording is replayed

Shards, optimizer state and other tensors that persist between calls are read and written in place. If the address of
such a tensor or the value of a number changes, warm-up starts again. If recording fails, a warning is shown, and all
further calls run the program without a recording.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from zgraph.codegen.cuda_graph_refusals import check_recordable
from zgraph.errors import ZgraphError, ZgraphWarning
from zgraph.torch_compat.aot import boxed

Program = Callable[[list[Any]], Any]
WARM_UP_CALLS = 3  # same number as in torch.cuda.make_graphed_callables
MOST_CHANGES = 8  # consecutive changes of inputs without a replay in between


class Recording(NamedTuple):
    """A recorded program, which reads its inputs at fixed addresses.

    Attributes:
        replay: runs the program once more.
        outputs: outputs of the program; each replay overwrites the tensors among them.
    """

    replay: Callable[[], object]
    outputs: Sequence[Any]


class RecordError(ZgraphError):
    """A program cannot be recorded; no part of it has run."""


class Recorder(Protocol):
    """Interface that records programs on a device; all programs belong to one training step.

    Attributes:
        has_failed: whether a recording has failed; from then on, nothing is recorded or replayed.
    """

    has_failed: bool

    def check(self, gm: fx.GraphModule, resident: int) -> None:
        """Raise a ZgraphError if a replay of the graph would skip some of its work.

        Args:
            gm: final graph of the step.
            resident: number of leading inputs that keep their addresses from call to call.
        """
        ...

    def warm_up(self, program: Program, inputs: list[Any]) -> Any:
        """Run a program as it will run when it is recorded; return its outputs."""
        ...

    def record(self, program: Program, inputs: list[Any]) -> Recording:
        """Record a program without running it.

        Raises:
            RecordError: the program cannot be recorded; the device is in its previous state.
        """
        ...


@dataclass(frozen=True)
class RecordedSteps:
    """Settings for recording the graph of a whole training step.

    Attributes:
        recorder: recorder of the device.
        resident: number of leading inputs that keep their addresses from call to call.
    """

    recorder: Recorder
    resident: int

    def check(self, gm: fx.GraphModule) -> None:
        self.recorder.check(gm, self.resident)

    def of(self, program: Program, gm: fx.GraphModule) -> Program:
        """Wrap a graph's program so that it is recorded after its warm-up calls, and replayed from then on."""
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        return boxed(_Recorded(program, names, self.resident, self.recorder))


class _Recorded:
    """A program that is recorded after warm-up, and replayed while its inputs keep their addresses."""

    def __init__(self, program: Program, names: Sequence[str], resident: int, recorder: Recorder) -> None:
        self._program, self._names, self._resident, self._recorder = program, names, resident, recorder
        self._held_for: list[Any] = []  # addresses of resident inputs; None for other tensors; values of numbers
        self._calls = self._changes = 0
        self._recording: Recording | None = None
        self._copied: list[Tensor] = []
        self._is_made: list[bool] = []

    def __call__(self, args: list[Any]) -> Any:
        inputs = args.copy()
        args.clear()
        if self._recorder.has_failed:
            self._recording, self._copied = None, []
            return self._program(inputs)
        self._follow(inputs)
        if self._recording is None and self._calls < WARM_UP_CALLS:
            self._calls += 1
            return self._recorder.warm_up(self._program, inputs)
        if self._recording is None:
            try:
                self._recording = self._record(inputs)
            except RecordError as error:
                self._recorder.has_failed, self._copied = True, []
                warnings.warn(str(error), ZgraphWarning, stacklevel=2)
                return self._program(inputs)
        given = [value for value in inputs[self._resident :] if isinstance(value, Tensor)]
        for target, source in zip(self._copied, given, strict=True):
            target.copy_(source)
        self._recording.replay()
        made = zip(self._recording.outputs, self._is_made, strict=True)
        # The next replay overwrites tensors created by this one.
        return [output.clone() if is_made else output for output, is_made in made]

    def _follow(self, inputs: Sequence[Any]) -> None:
        """Drop the recording if an address or a number among the inputs has changed.

        Raises:
            ZgraphError: inputs change so often that recordings are never replayed.
        """
        key = [*map(Tensor.data_ptr, inputs[: self._resident])]
        key += [None if isinstance(value, Tensor) else value for value in inputs[self._resident :]]
        if key == self._held_for:
            return
        if self._held_for:
            self._changes = 0 if self._recording is not None else self._changes + 1
        if self._changes == MOST_CHANGES:
            place = next(place for place, (new, old) in enumerate(zip(key, self._held_for, strict=True)) if new != old)
            raise ZgraphError(_restless(self._names[place], is_number=place >= self._resident))
        self._held_for, self._recording, self._copied, self._calls = key, None, [], 0

    def _record(self, inputs: Sequence[Any]) -> Recording:
        staying, passing = list(inputs[: self._resident]), list(inputs[self._resident :])
        for place, value in enumerate(passing):
            if isinstance(value, Tensor):
                static = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                passing[place] = static.copy_(value)
        self._copied = [value for value in passing if isinstance(value, Tensor)]
        recording = self._recorder.record(self._program, [*staying, *passing])
        lasting = {value.untyped_storage().data_ptr() for value in staying}
        self._is_made = [
            isinstance(output, Tensor) and output.untyped_storage().data_ptr() not in lasting
            for output in recording.outputs
        ]
        return recording


def _restless(name: str, *, is_number: bool) -> str:
    if is_number:
        found = f"{name} has another value"
        instead = 'make it a tensor on the GPU, such as lr=torch.tensor(1e-3, device="cuda") of a fused optimizer'
    else:
        found, instead = f"{name} has moved", "write to the tensor in place, or pass it to the step as an argument"
    return (
        f"zgraph.training_step: {found} in each of {MOST_CHANGES} calls, but a CUDA graph requires fixed addresses and "
        f"numbers; {instead}, or leave out cuda_graph."
    )


class CudaGraphs:
    """Recorder for the current GPU; all graphs of a step share one stream and one memory pool.

    The graphs run one after another, and the outputs of each are copied before the next one runs.

    The stream that is recorded runs nothing else, so that its cuBLAS workspace is allocated in the pool, which keeps
    the memory for the graphs. torch frees workspaces when `torch.compile(mode="reduce-overhead")` records another
    model, or a graph of the same stream is deleted; with one from the warm-up calls, replays would write to freed
    memory (https://github.com/pytorch/pytorch/issues/193402).
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._warm_up_stream = torch.cuda.Stream()
        self._stream: Any = None  # of the pool
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def check(self, gm: fx.GraphModule, resident: int) -> None:
        check_recordable(gm, resident)

    def warm_up(self, program: Program, inputs: list[Any]) -> Any:
        current = torch.cuda.current_stream()
        self._warm_up_stream.wait_stream(current)
        with torch.cuda.stream(self._warm_up_stream):
            outputs = program(inputs)
        current.wait_stream(self._warm_up_stream)
        return outputs

    def record(self, program: Program, inputs: list[Any]) -> Recording:
        if not self._graphs:
            # A pool whose last graph was deleted cannot be recorded into while any of its tensors is alive.
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events meanwhile, which would invalidate a capture of all threads.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with capture:
                outputs = program(inputs)
        except RuntimeError as error:
            _leave_capture(current)
            raise RecordError(
                f"zgraph.training_step: the step cannot be recorded as a CUDA graph: {error}. Training continues "
                "without it. The usual reason is an operator that waits for the GPU or copies from pageable memory; "
                "leave out cuda_graph, or the operator."
            ) from error
        self._graphs.add(graph)
        return Recording(graph.replay, outputs)


def _leave_capture(stream: torch.cuda.Stream) -> None:
    """Undo the state that a failed capture leaves behind (torch 2.11 - 2.13).

    The stream of the capture is still the current one, and the GPU's generator is in capture mode, in which ordinary
    draws of random numbers fail.
    """
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):  # if the GPU is lost, the capture's own error says more
        torch.cuda.synchronize()
    generator = torch.cuda.default_generators[stream.device.index]
    generator.graphsafe_set_state(generator.clone_state())
