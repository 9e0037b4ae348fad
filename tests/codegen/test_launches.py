"""How Triton kernels are launched: on the device of their tensors, once for all ranks, and tried on their own numbers.

No kernel runs: a recorder stands in for the launch.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.kernels.buckets import needs_triton
from zgraph.codegen import compressed_kernels
from zgraph.codegen.compressed_kernels import Kernels
from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.triton import checks, dequantize_blocks, launch_options, quantize_blocks
from zgraph.codegen.kernels.triton.constants import quantize_constants
from zgraph.codegen.kernels.triton.launch_options import OPTIONS, LaunchOptions, compile_all, drawn, start
from zgraph.compression.method_text import to_text
from zgraph.compression.methods import LoCo, NoFeedback, RngKey
from zgraph.compression.payload import BucketLayout
from zgraph.dialect.compressed import shard_bytes

SECOND_GPU = torch.device("cuda", 1)


class Recorder:
    """Notes the current device and the grid of each launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[torch.device | None, tuple[int, ...]]] = []
        self.current: torch.device | None = None
        recorder = self

        class Device:
            def __init__(self, device: torch.device) -> None:
                self.device, self.before = device, recorder.current

            def __enter__(self) -> None:
                recorder.current = self.device

            def __exit__(self, *_: object) -> None:
                recorder.current = self.before

        def load(_: str) -> NotLaunched:
            return NotLaunched(self)

        monkeypatch.setattr(torch.cuda, "device", Device)
        monkeypatch.setattr(launch_options, "load", load)
        monkeypatch.setattr(checks, "address_of", lambda tensor: 0)  # pyright: ignore[reportUnknownLambdaType]


class NotLaunched:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self.recorder.launches.append((self.recorder.current, grid))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def quantize(device: torch.device) -> None:
    layout = BucketLayout(LoCo(), (1000,), world=2)
    state = {
        name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in LoCo().state(1000, 2).items()
    }
    payload = torch.zeros(2, layout.payload_bytes, dtype=torch.uint8, device=device)
    grads = [torch.ones(2000, device=device)]
    quantize_blocks.quantize_bucket(grads, [state], layout, RngKey(0), 0, payload, options=LaunchOptions())


def dequantize(device: torch.device) -> None:
    layout = BucketLayout(LoCo(), (1000,), world=2)
    received = torch.zeros(2, layout.payload_bytes, dtype=torch.uint8, device=device)
    outputs = [torch.zeros(1000, device=device)]
    dequantize_blocks.dequantize_sum_bucket(received, layout, RngKey(0), 0, 2, outputs, options=LaunchOptions())


def dequantize_each(device: torch.device) -> None:
    layout = BucketLayout(LoCo(), (1000,), world=1)
    received = torch.zeros(2, layout.payload_bytes, dtype=torch.uint8, device=device)
    outputs = [torch.zeros(2, 1000, device=device)]
    dequantize_blocks.dequantize_each_bucket(received, layout, RngKey(0), outputs, options=LaunchOptions())


@pytest.mark.parametrize("run", [quantize, dequantize, dequantize_each])
def test_kernels_are_launched_on_the_device_of_their_tensors(
    run: Callable[[torch.device], None], recorder: Recorder
) -> None:
    """Whichever device is current: Triton launches on that one."""
    with FakeTensorMode():
        run(SECOND_GPU)
    assert [device for device, _ in recorder.launches] == [SECOND_GPU]
    assert recorder.current is None, "the user's device is the current one again"


@pytest.fixture
def as_on_a_gpu(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    kernels = Kernels(quantize_blocks, dequantize_blocks)
    monkeypatch.setattr(compressed_kernels, "_kernels", lambda device: kernels)  # pyright: ignore[reportUnknownLambdaType]
    return recorder


@pytest.mark.parametrize("world", [1, 5])
def test_a_gather_is_decoded_in_one_launch(world: int, as_on_a_gpu: Recorder) -> None:
    """Whatever the number of ranks, and wherever in their payloads the parameter lies."""
    method = to_text(NoFeedback())
    sizes = [shard_bytes(method, numel) for numel in (100, 300)]
    received = torch.zeros(world * sum(sizes), dtype=torch.uint8)
    torch.ops.zgraph.dequantize_shards.default(received, method, 300, sizes[0], world, torch.float32)
    assert len(as_on_a_gpu.launches) == 1
    layout = BucketLayout(NoFeedback(), (100, 300), world=1)
    received = torch.zeros(world * layout.payload_bytes, dtype=torch.uint8)
    torch.ops.zgraph.dequantize_each.default(received, torch.tensor([0]), method, (100, 300), world, 0, torch.float32)
    assert len(as_on_a_gpu.launches) == 2
    assert all(grid[1] == world for _, grid in as_on_a_gpu.launches)


class Compiles:
    """A kernel whose compiling waits for that with all other options."""

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.all_at_once = threading.Barrier(len(OPTIONS), timeout=10)

    def warmup(self, number: int, *, grid: tuple[int, ...], num_warps: int, **_: Any) -> None:
        assert (number, grid) == (7, (3,))
        mode: Any = importlib.import_module("triton.runtime._async_compile").active_mode.get()
        # triton 3.9 asks what to do after a failure as well
        given = {"cleanup_fn": lambda: None} if "cleanup_fn" in inspect.signature(mode.submit).parameters else {}
        mode.submit(num_warps, lambda: self.all_at_once.wait(), lambda _: self.compiled.append(num_warps), **given)


@needs_triton
def test_options_are_compiled_side_by_side() -> None:
    """None is done before all have begun."""
    kernel = Compiles()
    case = quantize_constants(LoCo(), torch.float32, aligned=True)
    compile_all(lambda options: start(kernel, (3,), options, case, 7, contracts=True))
    assert sorted(kernel.compiled) == [options.warps for options in OPTIONS]


def test_kernel_trials_leave_the_users_generator_alone() -> None:
    """A step with dropout, resumed in a process that has yet to try its kernels, would else draw other numbers."""
    before = torch.get_rng_state()
    first, second = (drawn(1000, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second) and first.dtype == torch.bfloat16 and first.float().std() > 0.9


def test_signs_are_made_where_they_are_needed() -> None:
    assert reference.draw_signs(3, 128, RngKey(0), 0, torch.device("meta")).device.type == "meta"
    assert reference.draw_signs(3, 128, RngKey(0), 0).device.type == "cpu"


class Gpu:
    """A host and a device, whose clocks stand for those of a GPU that launches are sent to."""

    def __init__(self) -> None:
        self.host_us = self.device_us = 0.0

    def launch(self, host_us: float, device_us: float) -> None:
        self.host_us += host_us
        self.device_us = max(self.device_us, self.host_us) + device_us

    def event(self, enable_timing: bool) -> Any:
        class Event:
            at = 0.0

            def record(event) -> None:
                event.at = max(self.device_us, self.host_us)

            def synchronize(event) -> None:
                self.host_us = max(self.host_us, event.at)

            def elapsed_time(event, end: Any) -> float:
                return (end.at - event.at) / 1e3

        return Event()


def test_options_are_chosen_by_the_time_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that the host takes longer to launch is the faster one, and is launched while the GPU is busy."""
    gpu, slow, quick = Gpu(), *launch_options.OPTIONS
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(launch_options, "compile_all", lambda run: None)
    monkeypatch.setattr(launch_options, "keep_busy", lambda cycles: gpu.launch(10.0, cycles / 2e3))

    def run(options: LaunchOptions) -> None:
        gpu.launch(*{slow: (150.0, 60.0), quick: (250.0, 12.0)}[options])

    assert launch_options.fastest(run, torch.device("cpu")) == quick
