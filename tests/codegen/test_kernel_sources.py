"""The dump shows what compressed collectives run: the source that is compiled, with its shapes and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.compiled import with_fx
from tests.support.graphs import apply, fake_world, mlp, traced
from tests.support.ranks import Ranks
from zgraph import PassList, shard
from zgraph.codegen.kernel_sources import Dequantize, Quantize, sources_of
from zgraph.codegen.kernels.cpu import source as cpu_source
from zgraph.codegen.kernels.triton.dequantize_blocks import Task
from zgraph.compression.method_text import to_text
from zgraph.compression.methods import RngKey, TensorMethod
from zgraph.compression.payload import BucketLayout
from zgraph.passes import CompressGradients, LoCo, LowerGathers, LowerReductions, NoFeedback, QuantizeGathers, presets

SMALL = LoCo(group=32)


@dataclass(frozen=True, kw_only=True)
class NotOurs(TensorMethod):
    """Says no more than tracing asks for."""

    name: ClassVar[str] = "tests.not_ours"

    def sections(self, numel: int) -> tuple[int, ...]:
        return (4 * numel,)

    def quantize(self, grad: Tensor, state: dict[str, Tensor], draw: RngKey, rank: int) -> Sequence[Tensor]:
        raise AssertionError("nothing runs here")

    def dequantize_sum(self, sections: Sequence[Tensor], numel: int, draw: RngKey) -> Tensor:
        raise AssertionError("nothing runs here")


def sources(zero_stage: int, *passes: Any, direction: Any = "backward") -> dict[str, str]:
    with fake_world(2):
        found = traced(mlp, zero_stage=zero_stage)
        for entry in passes:
            apply(entry, found, direction)
        return sources_of(found.graphs[direction].graph)


def test_reduction_shows_its_two_compiled_kernels() -> None:
    found = sources(3, CompressGradients(method=SMALL, min_numel=30, skip=("2.*", "4.*")), LowerReductions())
    quantize, dequantize = found.values()
    assert quantize.endswith(cpu_source.emit_quantize(SMALL, torch.float32))
    assert dequantize.endswith(cpu_source.emit_dequantize(SMALL, torch.float32))
    # 7 rows of 5 elements: 4 rows for each rank; a group of 32 takes 16 bytes and a scale of 2, filled up to 16s.
    first, second, *_ = quantize.splitlines()
    assert first.endswith(": 1 tensors, each in 2 chunks. Elements of their chunks: 20.")
    assert second == "// Payload: 32 bytes for each of 2 ranks."


def test_means_have_kernels_of_their_own() -> None:
    means = LoCo(bits=8, group=32)
    found = sources(0, CompressGradients(method=SMALL, min_numel=30, skip=("2.*", "4.*"), mean_codec=means))
    assert len(found) == 4
    assert sum(cpu_source.emit_dequantize(means, torch.float32) in source for source in found.values()) == 1


def test_gathered_codes_show_theirs() -> None:
    method = NoFeedback(bits=8, group=64)
    found = sources(3, QuantizeGathers(method=method, min_numel=30), LowerGathers(), direction="forward")
    assert sum(cpu_source.emit_quantize(method, torch.float32) in source for source in found.values()) == 2
    assert sum(cpu_source.emit_dequantize(method, torch.float32) in source for source in found.values()) == 2


def test_products_and_lookups_of_codes_show_theirs() -> None:
    """One for each node: a lookup decodes rows, a product decodes in registers."""
    method = NoFeedback(bits=4, group=64)

    def read(x: Tensor, ids: Tensor, codes: Tensor) -> Tensor:
        args = (to_text(method), 256, 0, 1, 4, 64)
        looked_up = torch.ops.zgraph.lookup_codes(codes, ids, *args, torch.bfloat16)
        return looked_up @ torch.ops.zgraph.multiply_codes(x, codes, *args, False).t()

    inputs = (torch.ones(2, 4, dtype=torch.bfloat16), torch.tensor([0]), torch.zeros(144, dtype=torch.uint8))
    found = sources_of(make_fx(read, tracing_mode="fake")(*inputs).graph)
    assert [*found] == ["lookup_codes.cpp", "multiply_codes.cpp"]
    assert found["lookup_codes.cpp"].endswith(cpu_source.emit_dequantize(method, torch.bfloat16))
    assert found["multiply_codes.cpp"].endswith(cpu_source.emit_multiply(method))


def test_methods_of_users_have_none() -> None:
    assert sources(3, CompressGradients(method=NotOurs(), min_numel=30)) == {}


def test_those_for_gpus_name_their_buckets() -> None:
    """A source for each dtype; of fp32 no size is a multiple of 8."""
    layout = BucketLayout(SMALL, (64, 20), world=2)
    tensors = (torch.empty(128, dtype=torch.bfloat16, device="meta"), torch.empty(40, device="meta"))
    sources = (
        Quantize(layout, tensors).triton("quantize_grads"),
        Dequantize(layout, torch.float32, torch.device("cuda"), Task(divisor=2)).triton("dequantize_sum"),
    )
    for source in sources:
        compile(source, "source", "exec")
        assert ": 2 tensors, each in 2 chunks. Elements of their chunks: 64, 20." in source.splitlines()[0]
    assert sources[0].count("CASE.grad = ") == 2 and sources[0].count("def quantize(") == 1
    assert "16 bytes of the gradient at once" in sources[0]
    assert "one element of the gradient at once" in sources[0] and "one element of the output at once" in sources[1]


def test_those_for_gpus_show_their_constants_and_count_their_bytes() -> None:
    """2 (gradient) + 1 (error) + 1/2 (codes) + 1 (new error), and three scales of 2 bytes for 128 elements; half a byte
    and a 64th of a byte read from each rank, and 4 bytes written."""
    layout = BucketLayout(LoCo(), (128,), world=2)
    quantize = Quantize(layout, (torch.empty(256, dtype=torch.bfloat16, device="meta"),)).triton("quantize_grads")
    assert "# bytes of a group of 128: 386 read + 196 written = 582, 4.547 for each element" in quantize
    assert "# LoCo(bits=4, group=128, rotate=True" in quantize and "# CASE.exact_sums = True\n" in quantize
    dequantize = Dequantize(layout, torch.float32, torch.device("cuda"), Task(divisor=3)).triton("dequantize_sum")
    assert "# bytes of a group of 128: 66 read of each rank + 512 of its output, 0.516 + 4.000 for each" in dequantize
    assert "# CASE.divides = True\n" in dequantize and "def hadamard(x):" in dequantize


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_they_land_in_the_dump(ranks: Ranks, tmp_path: Path, zero_stage: int) -> None:
    ranks.run(dumped, tmp_path, zero_stage)
    for rank in range(2):
        written = {path.name: path.read_text() for path in tmp_path.glob(f"rank{rank}/**/*.cpp")}
        assert written and all('extern "C" void' in text for text in written.values())


def dumped(directory: Path, zero_stage: int) -> None:
    sharded: Any = shard(mlp(), zero_stage=zero_stage)
    passes = presets.default(compression=SMALL)
    passes = [CompressGradients(method=SMALL, min_numel=30) if isinstance(e, CompressGradients) else e for e in passes]
    with_fx(sharded, passes=PassList(passes), dump=directory)(torch.ones(3, 5)).sum().backward()
