"""Activation checkpointing inside a compiled model: checkpointed blocks stay in its graph; what leaves it is named."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zgraph
from examples.zoo import ZOO
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks

aten = torch.ops.aten


def keep_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_products)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}


def gradients(model: nn.Module) -> list[Any]:
    found = [None if one.grad is None else cast(Any, one.grad).to_local().clone() for one in model.parameters()]
    model.zero_grad()
    return found


def differing(found: list[Any], expected: list[Any], **tolerances: float) -> list[int]:
    """Places of gradients that differ, by a bit unless tolerances say otherwise."""
    return [
        place
        for place, (one, other) in enumerate(zip(found, expected, strict=True))
        if (one is None) != (other is None)
        or (one is not None and not torch.allclose(one, other, **{"rtol": 0.0, "atol": 0.0, **tolerances}))
    ]


def shape_of(model: nn.Module) -> tuple[int, list[int], int, int]:
    """Frames; buckets of each graph; the first forward's predicted peak; its backward's."""
    graphs = zgraph.summary(model).graphs
    frames = {graph.frame.split("/")[0] for graph in graphs}
    peaks = {graph.direction: graph.peak.bytes for graph in reversed(graphs) if graph.peak is not None}
    return len(frames), [graph.buckets for graph in graphs], peaks["forward"], peaks["backward"]


# --- models of Hugging Face -------------------------------------------------------------------------------------------


def train_hugging_face(name: str, zero_stage: int, kind: str, accumulates: bool, lowering: str) -> dict[str, Any]:
    """One step of the model with checkpointing, without it, and without zgraph's passes.

    The last is compiled by torch's "aot_eager", whose attention differs from eager torch in the last bit on some CPUs.
    """
    torch.manual_seed(0)
    plain = ZOO[name].build(2).train()
    plain.config.use_cache = False
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable(KINDS[kind])
    batches = [ZOO[name].batch(torch.Generator().manual_seed(7 * number + dist.get_rank())) for number in range(3)]
    found: dict[str, Any] = {}
    for title, model in (("aot_eager", copy.deepcopy(plain)), ("without", plain), ("with", checkpointed)):
        torch.compiler.reset()
        zgraph.shard(model, zero_stage=zero_stage)
        options: Any = {"backend": "zgraph", "options": {"lowering": lowering}}
        call: Any = torch.compile(model, **({"backend": title} if title == "aot_eager" else options))
        for batch in batches[: 2 if accumulates else 0]:
            with zgraph.no_sync(model):
                call(**batch).loss.backward()
        call(**batches[2]).loss.backward()
        found[title] = gradients(model)
        if title != "aot_eager":
            found[f"shape {title}"] = shape_of(model)
            found[f"outside {title}"] = zgraph.summary(model).uncompiled
    tolerances = {} if lowering == "fx" else {"rtol": 1e-4, "atol": 1e-6}
    return {
        "differing": differing(found["with"], found["aot_eager"], **tolerances),
        "with": found["shape with"],
        "without": found["shape without"],
        "outside": found["outside with"],
    }


# Pairwise: each model, stage, kind and window with each other value of the others, more or less. Below, small models
# look at the same at every stage, and are fast. Inductor compiles for a minute.
HUGGING_FACE = [
    ("llama", 3, "plain", False, "fx"),
    ("bert", 2, "selective", False, "fx"),
    ("vit", 0, "plain", True, "fx"),
    *long(
        ("llama", 1, "reentrant", True, "fx"),
        ("llama", 2, "plain", True, "fx"),
        ("llama", 0, "selective", False, "fx"),
        ("bert", 0, "reentrant", False, "fx"),
        ("bert", 3, "selective", True, "fx"),
        ("bert", 1, "plain", False, "fx"),
        ("vit", 3, "reentrant", True, "fx"),
        ("vit", 1, "selective", True, "fx"),
        ("vit", 2, "reentrant", False, "fx"),
        ("llama", 3, "plain", False, "inductor"),
        ("bert", 1, "reentrant", True, "inductor"),
    ),
]


@pytest.mark.parametrize(("name", "zero_stage", "kind", "accumulates", "lowering"), HUGGING_FACE)
def test_checkpointed_blocks_stay_in_the_graph(
    ranks: Ranks, name: str, zero_stage: int, kind: str, accumulates: bool, lowering: str
) -> None:
    for found in ranks.run(train_hugging_face, name, zero_stage, kind, accumulates, lowering):
        assert found["differing"] == [] and found["outside"] == ""
        frames, buckets, forward_peak, _ = found["with"]
        assert (frames, buckets) == found["without"][:2]
        assert forward_peak < found["without"][2], "what backward computes again is not saved"


# --- reads of every kind ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """nn.MultiheadAttention reads the weight of its out_proj without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.attention(x, x, x, need_weights=False)[0])


class ReadThrice(nn.Module):
    """One weight in a loop, and by the module around its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return x + x @ self.inner.weight


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(6, 7), nn.Linear(7, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x)))) * self.gain


class Nested(nn.Module):
    """A block with a region of its own, inside of the region around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Mlp(), nn.Linear(6, 6)
        self.checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.outer(x))
        return cast(Tensor, checkpoint(self.inner, x, use_reentrant=False)) if self.checkpointed else self.inner(x)


class Parametrized(nn.Module):
    """The weight that is used is computed from the parameter at each read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        nn.utils.parametrizations.weight_norm(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Spare(nn.Module):
    """A parameter that is not read, which as part of a named unit gets zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unread = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Blocks between two layers whose weight is tied, each in a region."""

    def __init__(self, block: Callable[[], nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.enter, self.blocks, self.leave = (
            nn.Linear(6, 6),
            nn.ModuleList(block() for _ in range(2)),
            nn.Linear(6, 6),
        )
        self.leave.weight = self.enter.weight
        self.options, self.checkpointed = options, True

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = cast(Tensor, checkpoint(block, x, **self.options)) if self.checkpointed else block(x)
        return self.region(self.leave, x)

    def region(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(function, x, **self.options)) if self.checkpointed else function(x)


def train_stack(
    block: type[nn.Module], zero_stage: int, kind: str, accumulates: bool, units: tuple[type[nn.Module], ...]
) -> dict[str, Any]:
    batches = [torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(dist.get_rank() + 5 * n)) for n in range(2)]
    found: dict[str, Any] = {}
    for title in ("eager", "without", "with"):
        torch.compiler.reset()
        torch.manual_seed(1)
        model = Stack(block, KINDS[kind])
        for part in model.modules():
            if title != "with" and hasattr(part, "checkpointed"):
                part.checkpointed = False
        zgraph.shard(model, zero_stage=zero_stage, units=units)
        call = model if title == "eager" else with_fx(model)
        for batch in batches if accumulates else batches[:1]:
            with zgraph.no_sync(model) if batch is not batches[-1] and accumulates else contextlib.nullcontext():
                call(batch).square().sum().backward()
        found[title] = gradients(model)
        if title != "eager":
            found[f"shape {title}"] = shape_of(model)
    return {
        "differing": differing(found["with"], found["eager"]),
        "with": found["shape with"][:2],
        "without": found["shape without"][:2],
    }


STACKS = [
    (Mlp, 1, "plain", True, (Mlp,)),
    (Attention, 3, "reentrant", False, ()),
    # Each runs three models, two of them compiled. What blocks read in other ways is seen without checkpoints, too.
    (Mlp, 1, "reentrant", True, (Mlp,)),
    (ReadThrice, 2, "plain", True, ()),
    (Parametrized, 1, "plain", False, ()),
    (Spare, 3, "selective", False, (Spare,)),
    (Nested, 3, "selective", False, (Mlp,)),
    # Each of their values, with others.
    *long(
        (Mlp, 3, "plain", True, ()),
        (Attention, 0, "plain", True, ()),
        (ReadThrice, 3, "reentrant", False, (Stack,)),
        (Nested, 0, "reentrant", False, (Nested,)),
        (Nested, 1, "plain", True, ()),
        (Parametrized, 3, "selective", True, (Parametrized,)),
        (Spare, 2, "reentrant", True, (Spare,)),
        (Mlp, 0, "selective", False, (Stack,)),
        (Mlp, 2, "selective", True, (Mlp,)),
    ),
]


@pytest.mark.parametrize(("block", "zero_stage", "kind", "accumulates", "units"), STACKS)
def test_a_checkpointed_region_reads_what_its_modules_read(
    ranks: Ranks,
    block: type[nn.Module],
    zero_stage: int,
    kind: str,
    accumulates: bool,
    units: tuple[type[nn.Module], ...],
) -> None:
    for found in ranks.run(train_stack, block, zero_stage, kind, accumulates, units):
        assert found["differing"] == []
        assert found["with"] == found["without"] and found["with"][0] == 1


# --- regions that no module of the model is around --------------------------------------------------------------------


def train_parts(zero_stage: int, accumulates: bool) -> dict[str, Any]:
    """A compiled function checkpoints two parts of a model whose root is not called; or one, also under `no_sync`."""
    found: dict[str, Any] = {}
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for title in ("eager", "compiled"):
        torch.compiler.reset()
        torch.manual_seed(1)
        model = zgraph.shard(nn.ModuleDict({"encoder": Mlp(), "decoder": Mlp()}), zero_stage=zero_stage)
        parts = [model["encoder"]] if accumulates else [model["encoder"], model["decoder"]]
        is_compiled = title == "compiled"

        def run(x: Tensor, parts: list[nn.Module] = parts, is_compiled: bool = is_compiled) -> Tensor:
            for part in parts:
                x = cast(Tensor, checkpoint(part, x, use_reentrant=False)) if is_compiled else part(x)
            return x

        call = with_fx(run) if is_compiled else run
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", zgraph.ZgraphWarning)
            for held in (True, False) if accumulates else (False, False):
                with zgraph.no_sync(model) if held else contextlib.nullcontext():
                    call(x).square().sum().backward()
        found[title] = gradients(model)
    report = model["encoder"]._zgraph.scope.report
    graphs = [] if report is None else cast(zgraph.Report, report).graphs
    said = [str(one.message) for one in caught if issubclass(one.category, zgraph.ZgraphWarning)]
    return {"differing": differing(found["compiled"], found["eager"]), "graphs": len(graphs), "said": said}


@pytest.mark.parametrize("zero_stage", [3, 1])
def test_parts_that_a_function_checkpoints_are_compiled(ranks: Ranks, zero_stage: int) -> None:
    for found in ranks.run(train_parts, zero_stage, False):
        assert found == {"differing": [], "graphs": 2, "said": []}


def test_part_that_must_note_its_window_leaves_the_graph(ranks: Ranks) -> None:
    """In a region nothing may be noted, and outside of it nothing of the model's runs."""
    for found in ranks.run(train_parts, 1, True):
        assert found["differing"] == []
        (said,) = found["said"]
        assert "parameters are gathered for encoder: a checkpointed region calls them while gradients" in said


# --- what leaves the graph --------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Writes a number in forward, which Dynamo refuses in a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.inner(x))


class SwitchedOff(nn.Module):
    """Blocks that the user keeps out of Dynamo's reach."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(6, 6), nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.compiler.disable(block)(x)
        return x


def warned(build: Callable[[], nn.Module], steps: int) -> tuple[list[str], str]:
    torch.compiler.reset()
    model = zgraph.shard(build())
    call = with_fx(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zgraph.ZgraphWarning)
        for _ in range(steps):
            call(torch.randn(2, 6)).sum().backward()
    said = [str(one.message) for one in caught if issubclass(one.category, zgraph.ZgraphWarning)]
    return said, str(zgraph.summary(model))


def counting() -> nn.Module:
    return Stack(Counting, KINDS["plain"])


@pytest.mark.parametrize("build", [counting, SwitchedOff])
def test_blocks_that_leave_the_graph_are_named_once(ranks: Ranks, build: Callable[[], nn.Module]) -> None:
    for said, summary in ranks.run(warned, build, 3):
        assert len(said) == 1
        for text in (said[0], summary):
            assert "blocks.0, blocks.1. Dynamo's graph breaks are: " in text
        assert "gathered outside of graphs: " in summary


# --- control flow -----------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        return cast(Tensor, torch.cond(which.sum() > 0, lambda t: self.left(t), lambda t: self.right(t), (x,)))


def branch(is_compiled: bool, is_unit: bool) -> str | list[int]:
    """Ranks take different branches. The error; or which gradients differ from the mean of both."""
    torch.compiler.reset()
    torch.manual_seed(1)
    plain, model = Branching(), Branching()
    model.load_state_dict(plain.state_dict())
    inputs = [torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    (plain.left(inputs[0]).square().sum() / 2 + plain.right(inputs[1]).square().sum() / 2).backward()
    zgraph.shard(model, units=[Branching] if is_unit else None)
    call = with_fx(model) if is_compiled else model
    rank = dist.get_rank()
    try:
        call(inputs[rank], torch.tensor([1.0 - 2 * rank])).square().sum().backward()
    except zgraph.ZgraphError as error:
        return str(error)
    wholes = [cast(Any, one.grad).full_tensor() for one in model.parameters()]
    return differing(wholes, [one.grad for one in plain.parameters()], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("is_compiled", "is_unit"), [*itertools.product((True, False), (True, False))])
def test_a_branch_reads_what_a_unit_has_gathered(ranks: Ranks, is_compiled: bool, is_unit: bool) -> None:
    for found in ranks.run(branch, is_compiled, is_unit):
        if is_unit:
            assert found == []
        else:
            assert str(found).startswith("zgraph: left.weight is read inside torch.cond")
            assert "units=[" in str(found)


def windows_of_branches(zero_stage: int) -> tuple[list[list[int]], set[str]]:
    """Gradients of each window that differ from sums of means; and the compiled frames."""
    torch.compiler.reset()
    torch.manual_seed(1)
    plain, model = Branching(), Branching()
    model.load_state_dict(plain.state_dict())
    zgraph.shard(model, zero_stage=zero_stage, units=[Branching])
    call, found = with_fx(model), []
    for number in range(3):
        for micro_batch in range(2):
            seed = 4 * number + 2 * micro_batch
            inputs = [torch.randn(3, 6, generator=torch.Generator().manual_seed(seed + rank)) for rank in range(2)]
            (plain.left(inputs[0]).square().sum() / 2 + plain.right(inputs[1]).square().sum() / 2).backward()
            rank = dist.get_rank()
            with zgraph.no_sync(model) if micro_batch == 0 else contextlib.nullcontext():
                call(inputs[rank], torch.tensor([1.0 - 2 * rank])).square().sum().backward()
        wholes = [cast(Any, one.grad).full_tensor() for one in model.parameters()]
        found.append(differing(wholes, [one.grad for one in plain.parameters()], rtol=1e-6, atol=1e-6))
        plain.zero_grad()
        model.zero_grad()
    return found, {graph.frame.partition("/")[0] for graph in zgraph.summary(model).graphs}


@pytest.mark.parametrize("zero_stage", [3, 2])  # the same frames
def test_forward_ends_although_dynamo_traced_a_branch_in_it(ranks: Ranks, zero_stage: int) -> None:
    """Dynamo forgets what is written to a `__dict__` after a branch; each forward would be one inside of the first."""
    assert ranks.run(windows_of_branches, zero_stage) == [([[], [], []], {"0"})] * 2
