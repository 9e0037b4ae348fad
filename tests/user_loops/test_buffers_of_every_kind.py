"""Buffers and parameters of every dtype and stride: rank 0's values everywhere and nothing else touched, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.ranks import Ranks
from tests.support.user_loops import refusal
from tests.support.whole_tensors import whole

BESIDE = 64


def values() -> Tensor:
    """Others on each rank."""
    return torch.linspace(0, 1, 20).view(4, 5) + dist.get_rank()


def expanded() -> Tensor:
    return memory()[:5].expand(4, 5)


def memory() -> Tensor:
    """Numbers of this rank alone, of which a buffer shows only the first."""
    found = torch.full((BESIDE,), 100.0 + dist.get_rank())
    found[:5] = torch.arange(5.0) + dist.get_rank()
    return found


def overlapping() -> Tensor:
    return memory().as_strided((3, 3), (1, 1))


KINDS: dict[str, Callable[[], Tensor]] = {
    **{
        str(dtype).removeprefix("torch."): (lambda dtype=dtype: values().to(dtype))
        for dtype in (
            *(torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
            *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.bool),
        )
    },
    "0-d": lambda: values()[1, 1].clone(),
    "0-d int16": lambda: values()[1, 1].to(torch.int16),
    "no rows": lambda: values()[:0],
    "no columns": lambda: values()[:, :0],
    "transposed": lambda: values().t(),
    "channels_last": lambda: values().view(1, 4, 5, 1).to(memory_format=torch.channels_last),
    "every other row": lambda: values()[::2],
    "a column": lambda: values()[:, 1],
    "conjugated": lambda: values().to(torch.complex64).conj(),
    "expanded": expanded,
    "overlapping": overlapping,
}


def sent(kind: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", KINDS[kind](), persistent=False)
    table: Any = model.table
    layout = (table.dtype, table.shape, table.stride(), table.data_ptr())
    storage = torch.tensor([], dtype=torch.uint8).set_(table.untyped_storage()).clone()
    expected = KINDS[kind]().resolve_conj().clone()
    seen = expected.unsqueeze(-1).contiguous().view(torch.uint8)
    dist.broadcast(seen, src=0)
    zgraph.shard(model)
    assert (model.table.dtype, model.table.shape, model.table.stride(), model.table.data_ptr()) == layout
    found = model.table.resolve_conj().contiguous().unsqueeze(-1).view(torch.uint8)
    assert torch.equal(found, seen)
    if kind in ("expanded", "overlapping"):
        after = torch.tensor([], dtype=torch.uint8).set_(table.untyped_storage())
        assert torch.equal(after[20:], storage[20:]), "beside the buffer nothing was written"


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_get_the_values_of_rank_zero(ranks: Ranks, kind: str) -> None:
    ranks.run(sent, kind)


class Holder(nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, value in held.items():
            if isinstance(value, nn.Parameter) or not isinstance(value, Tensor):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)


class Marked(nn.Parameter):
    pass


def in_a_list() -> nn.Module:
    model = Holder()
    model.wanted = {"matrices": [model.layer.weight]}
    return model


def memory_of_a_weight() -> nn.Module:
    model = Holder()
    model.register_buffer("view", model.layer.weight.data[1:3])
    return model


def tied_through_data() -> nn.Module:
    model = Holder(other=nn.Linear(4, 4))
    model.other.weight.data = model.layer.weight.data
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse buffer": (lambda: Holder(b=torch.eye(4).to_sparse()), "the buffer b is of layout torch.sparse_coo"),
    "quantized buffer": (
        lambda: Holder(b=torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)),
        "the buffer b is quantized",
    ),
    "sparse": (lambda: Holder(p=nn.Parameter(torch.eye(4).to_sparse())), "p is of layout torch.sparse_coo"),
    "float8": (
        lambda: Holder(p=nn.Parameter(torch.eye(4).to(torch.float8_e4m3fn), requires_grad=False)),
        "p is a parameter of torch.float8_e4m3fn",
    ),
    "int16": (
        lambda: Holder(p=nn.Parameter(torch.ones(4, dtype=torch.int16), requires_grad=False)),
        "p is a parameter of torch.int16",
    ),
    "lazy": (lambda: Holder(lazy=nn.LazyLinear(3)), "lazy.weight has no shape yet"),
    "class": (lambda: Holder(p=Marked(torch.ones(4))), "p is a Marked, a class of its own"),
    "list": (in_a_list, "wanted holds the parameter layer.weight in a dict"),
    "view": (memory_of_a_weight, "layer.weight and view are a parameter and a buffer with the same memory"),
    "tied": (tied_through_data, "layer.weight and other.weight are parameters with the same memory"),
}


def refused(what: str) -> tuple[str, bool]:
    build, _ = REFUSED[what]
    model = build()
    before = {name: id(value) for name, value in model.named_parameters()}
    text = refusal(lambda: zgraph.shard(model))
    return text, before == {name: id(value) for name, value in model.named_parameters()}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_buffers_are_refused_before_anything_changes(ranks: Ranks, what: str) -> None:
    for text, is_unchanged in ranks.run(refused, what):
        assert REFUSED[what][1] in text and is_unchanged


FINE: dict[str, Callable[[], nn.Parameter]] = {
    "transposed": lambda: nn.Parameter(torch.randn(4, 5).t()),
    "channels_last": lambda: nn.Parameter(torch.randn(5, 4, 3, 3).to(memory_format=torch.channels_last)),
    "expanded": lambda: nn.Parameter(torch.randn(4).expand(5, 4)),
    "every other row": lambda: nn.Parameter(torch.randn(10, 4)[::2]),
    "no rows": lambda: nn.Parameter(torch.randn(0, 4)),
    "no columns": lambda: nn.Parameter(torch.randn(4, 0)),
    "one row": lambda: nn.Parameter(torch.randn(1, 4)),
    "int64": lambda: nn.Parameter(torch.randint(9, (5, 4)), requires_grad=False),
    "bool": lambda: nn.Parameter(torch.randint(2, (5, 4)).bool(), requires_grad=False),
}


def odd_parameter(kind: str, stage: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(5)
        return Holder(p=FINE[kind]())

    def loss(model: Any) -> Tensor:
        return (model.layer(torch.ones(2, 4)).sum() * model.p.float().square()).sum()

    plain: Any = build()
    loss(plain).backward()

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self) -> Tensor:
            return loss(self.inner)

    root: Any = zgraph.shard(Root(), zero_stage=stage)
    root().backward()
    assert torch.equal(whole(root.inner.p), plain.p)
    if plain.p.grad is not None:
        torch.testing.assert_close(whole(root.inner.p.grad), plain.p.grad)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", FINE)
def test_parameters_of_odd_strides_and_shapes_are_right(ranks: Ranks, kind: str, stage: int) -> None:
    ranks.run(odd_parameter, kind, stage)


def columns_of_one_matrix() -> None:
    """Views of one storage without a common element, as of a fused projection, are no tie."""
    fused = torch.randn(4, 8)
    model = Holder(q=nn.Parameter(fused[:, :4]), k=nn.Parameter(fused[:, 4:]), v=nn.Parameter(torch.randn(4, 4)))
    zgraph.shard(model)


def test_views_without_a_common_element_are_no_tie(ranks: Ranks) -> None:
    ranks.run(columns_of_one_matrix)
