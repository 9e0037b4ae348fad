"""Which operators read codes of weights, and which decode; tests/sharding/test_coded_weights.py compares results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from zgraph.compression.method_text import to_text
from zgraph.compression.methods import NoFeedback

Function = Callable[[Tensor, Tensor], Tensor]


class Reader(nn.Module):
    """Reads one weight."""

    def __init__(self, function: Function, rows: int, columns: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.function = nn.Parameter(torch.randn(rows, columns)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def served(function: Function, x: Tensor, rows: int = 64, columns: int = 128) -> tuple[list[str], Tensor, Tensor]:
    """The pass's notes, the result, and that of uncompiled code."""
    torch.compiler.reset()
    report = zgraph.Report()
    with loopback(1, Wire()), torch.no_grad():
        model = zgraph.shard(Reader(function, rows, columns), offload=zgraph.Offload(params="host", param_bits=4))
        compiled: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx", "report": report})
        found, expected = compiled(x), model(x)
    return [note for note in report.notes if note.startswith("read_codes")], found, expected


def check_close(found: Tensor, expected: Tensor) -> None:
    """Compare with decoded weights, which casts round; test_coded_weights.py compares both with fp64."""
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (found - expected).norm() <= torch.finfo(expected.dtype).eps * expected.norm()


X = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[5, 0], [63, 5]])
NARROW = X[:, :64]  # for products without a transpose


def in_bf16(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.linear(x, weight)


READ: dict[str, tuple[Function, Tensor]] = {
    "linear": (nn.functional.linear, X),
    "linear, three dims": (nn.functional.linear, X[None]),
    "with a bias": (lambda x, weight: torch.addmm(torch.ones(64), x, weight.t()), X),
    "some rows": (lambda x, weight: x @ weight[:10].mT, X),
    "a lookup": (lambda ids, weight: nn.functional.embedding(ids, weight), IDS),
    "not transposed": (torch.matmul, NARROW),
    "not transposed, more rows than a fused product takes": (torch.matmul, NARROW.repeat(30, 1)),
    "not transposed, some rows": (lambda x, weight: torch.addmm(torch.ones(128), x, weight[:10]), X[:, :10]),
    "transposed twice": (lambda x, weight: x @ weight.t().t(), NARROW),
    "autocast": (in_bf16, X),
    "cast, not transposed": (lambda x, weight: x.half() @ weight.half(), NARROW),
    "a cast lookup": (lambda ids, weight: nn.functional.embedding(ids, weight.bfloat16()), IDS),
    "no rows": (nn.functional.linear, X[:0]),
    "no ids": (lambda ids, weight: nn.functional.embedding(ids, weight), IDS[:0]),
}
DECODED: dict[str, tuple[Function, Tensor, int, int]] = {
    "not transposed, groups that rows share": (torch.matmul, X, 128, 65),
    "some columns": (lambda x, weight: x @ weight[:, :64], X[:, :64], 64, 128),
    "other rows, cast": (lambda x, weight: x.half() @ weight[1:].half().mT, X, 64, 128),
    "cast to fp64": (lambda x, weight: x.double() @ weight.double().mT, X, 64, 128),
    "other rows": (lambda x, weight: x @ weight[1:].mT, X, 64, 128),
    "scaled": (lambda x, weight: torch.addmm(torch.ones(64), x, weight.t(), alpha=2), X, 64, 128),
    "groups that rows share": (nn.functional.linear, X[:, :80], 64, 80),
    "also read as it is": (lambda x, weight: (x @ weight.t()) * weight.sum(), X, 64, 128),
    "by itself": (lambda x, weight: weight @ weight.t(), X, 64, 128),
}


@pytest.mark.parametrize("name", READ)
def test_codes_are_read(name: str) -> None:
    notes, found, expected = served(*READ[name])
    assert notes == ["read_codes on inference: 1 operators read codes"]
    check_close(found, expected)


def both(ids: Tensor, weight: Tensor) -> Tensor:
    """Two readers of one weight: AOTAutograd makes one node of equal casts."""
    weight = weight.bfloat16()
    return nn.functional.embedding(ids, weight) @ weight.mT


def test_a_cast_weight_may_have_several_readers() -> None:
    notes, found, expected = served(both, IDS)
    assert notes == ["read_codes on inference: 2 operators read codes"]
    check_close(found, expected)


@pytest.mark.parametrize("name", DECODED)
def test_weights_are_decoded(name: str) -> None:
    notes, found, expected = served(*DECODED[name])
    assert notes == ["read_codes on inference: no operator can read codes"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("ids", [[-1], [64]])
def test_ids_that_the_table_lacks_are_refused(ids: list[int]) -> None:
    with pytest.raises(IndexError, match=f"ids from {ids[0]} to {ids[0]} in a table of 64"):
        served(lambda ids, weight: nn.functional.embedding(ids, weight), torch.tensor(ids))


@pytest.mark.parametrize("count", [1, 2, 3, 7])  # up to four inputs share a pass over the weight
@pytest.mark.parametrize("transpose", [True, False])
def test_a_product_finds_its_weight_among_others(count: int, transpose: bool) -> None:
    """The second of two weights in the payloads of two ranks."""
    method, generator = to_text(NoFeedback(bits=4, group=64)), torch.Generator().manual_seed(0)
    rows, columns, world = 64, 128, 2
    shards = torch.randn(2, world, rows // world * columns, generator=generator)
    numel, operators = shards.shape[2], torch.ops.zgraph
    payloads = [operators.quantize_shards([*shards[:, rank]], method, [numel] * 2, rank) for rank in range(world)]
    received, offset = torch.cat(payloads), len(payloads[0]) // 2
    weight = operators.dequantize_shards(received, method, numel, offset, world, torch.float32).view(rows, columns)
    x = torch.randn(count, columns if transpose else rows, generator=generator)
    found = operators.multiply_codes(x, received, method, numel, offset, world, rows, columns, transpose)
    torch.testing.assert_close(found, x @ (weight.t() if transpose else weight))
