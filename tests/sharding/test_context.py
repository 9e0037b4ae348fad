"""Sequences shared by the ranks of a mesh axis: training is that of the whole model, and other loops are refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support import context as cp
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.passes import LoCo

EXACT = 1e-12  # fp64, relative to the largest entry of a parameter
# Sums in another order.
ROUNDING = {torch.float64: EXACT, torch.float32: 2e-6, torch.bfloat16: 4e-2}
# Between them each stage, lowering, way to run, and kind of attention, and each feature that touches gradients.
CASES = {
    "compiled": cp.Case(),
    "ring": cp.Case(heads=1, key_heads=1, stage=2, micro_batches=2),
    "ring_kept": cp.Case(key_heads=1, stage=3),
    "grouped": cp.Case(key_heads=2, stage=1, micro_batches=2, run="eager"),
    "documents": cp.Case(is_masked=True, stage=0),
    "documents_by_keys": cp.Case(is_masked=True, heads=1, key_heads=1, run="eager"),
    "checkpointed": cp.Case(is_checkpointed=True, stage=1),
    "checkpointed_eager": cp.Case(is_checkpointed=True, run="eager", key_heads=1),
    "step": cp.Case(run="step", stage=2, micro_batches=2, is_clipped=True),
    "step_ring": cp.Case(run="step", heads=1, key_heads=1, is_checkpointed=True),
    "outside": cp.Case(is_outside=True, is_clipped=True),
    "outside_step": cp.Case(is_outside=True, run="step", stage=0),
    "inductor": cp.Case(lowering="inductor", dtype=torch.float32, key_heads=2),
    "inductor_step": cp.Case(lowering="inductor", run="step", dtype=torch.float32, stage=1, heads=1, key_heads=1),
    "fp32": cp.Case(dtype=torch.float32, stage=2),
    "bf16": cp.Case(dtype=torch.bfloat16),
    "bf16_ring": cp.Case(dtype=torch.bfloat16, key_heads=1, micro_batches=2, run="step"),
    "autocast": cp.Case(dtype=torch.float32, autocast=torch.bfloat16, stage=2, key_heads=1),
}
ON_FOUR = {  # two copies of two ranks, or one of four
    "two_copies": (2, cp.Case(stage=2, micro_batches=2, is_clipped=True)),
    "two_copies_step": (2, cp.Case(run="step", heads=1, key_heads=1)),
    "four_ranks": (4, cp.Case(stage=3)),
    "four_ranks_ring": (4, cp.Case(heads=2, key_heads=1, run="eager", stage=0)),
    "four_ranks_ring_kept": (4, cp.Case(heads=8, key_heads=1, stage=1)),
    "four_ranks_two_key_heads": (4, cp.Case(key_heads=2, run="eager")),
}


def _apart(case: cp.Case, context: int) -> float:
    mesh = cp.mesh_of(dist.get_world_size(), context)
    return cp.furthest(cp.shared(case, mesh), cp.plain(case, mesh["dp"].size()))


@worlds(2)
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one(ranks: Ranks, name: str) -> None:
    case = CASES[name]
    apart = ranks.run(_apart, case, 2)
    assert max(apart) <= ROUNDING[torch.bfloat16 if case.autocast else case.dtype], apart


@worlds(4)
@pytest.mark.parametrize("name", ON_FOUR)
def test_copies_train_as_one(ranks: Ranks, name: str) -> None:
    context, case = ON_FOUR[name]
    apart = ranks.run(_apart, case, context)
    assert max(apart) <= EXACT, apart


def _bits(case: cp.Case) -> list[bytes]:
    return [one.contiguous().view(torch.uint8).numpy().tobytes() for one in cp.shared(case, cp.mesh_of(2, 2))]


@worlds(2)
@pytest.mark.parametrize("heads", [4, 1])  # keys pass by, and are kept or sent again
def test_compiled_forms_have_the_bits_of_eager(ranks: Ranks, heads: int) -> None:
    case = cp.Case(heads=heads, key_heads=1, dtype=torch.float32, stage=2, is_clipped=True)
    eager, compiled, step = (ranks.run(_bits, replace(case, run=run)) for run in ("eager", "compile", "step"))
    assert eager == compiled == step
    assert eager[0] == eager[1]


def _compressed() -> float:
    """Like without compression, as far as 4 bits go: the same loop with all gradients exact is its measure."""
    case = cp.Case(stage=2, dtype=torch.float32)
    mesh = cp.mesh_of(2, 2)
    exact = cp.shared(case, mesh)
    start = list(cp.started(case).parameters())
    found = cp.shared(replace(case, compression=zgraph.passes.CompressGradients(method=LoCo(), min_numel=64)), mesh)
    moved = sum(float((one - other).norm() ** 2) for one, other in zip(exact, start, strict=True))
    return (sum(float((one - other).norm() ** 2) for one, other in zip(found, exact, strict=True)) / moved) ** 0.5


@worlds(2)
def test_gradients_may_be_compressed(ranks: Ranks) -> None:
    apart = ranks.run(_compressed)
    assert apart[0] == apart[1]
    assert 0 < apart[0] < 0.1  # 4-bit codes of two ranks' gradients differ from them by some percent


def _resumed(folder: str) -> float:
    """Saves after each step, and trains a model of its own from the last checkpoint, by another number of ranks."""
    case = cp.Case(dtype=torch.float32)
    mesh = cp.mesh_of(2, 2)

    steps = itertools.count()

    def again(model: nn.Module, opt: Any) -> None:
        zgraph.save_checkpoint(folder, model, opt, step=next(steps))

    saved = cp.shared(case, mesh, again)
    model = zgraph.shard(cp.started(case), init_device_mesh("cpu", (2,)), zero_stage=1)
    opt = torch.optim.SGD(model.parameters(), lr=cp.LR)
    newest = zgraph.latest_checkpoint(folder)
    assert newest is not None
    zgraph.load_checkpoint(newest, model, opt)
    return cp.furthest([whole(one.detach()) for one in model.parameters()], saved)


@worlds(2)
def test_checkpoints_know_no_context(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks.run(_resumed, str(tmp_path / "saved")) == [0.0, 0.0]


# --- models of transformers -------------------------------------------------------------------------------------------


def _transformer(kind: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **sizes))
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # or the model logs a line in forward, which breaks the graph
        return model
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def _transformer_apart(kind: str, is_checkpointed: bool, compiled: bool) -> float:
    model = _transformer(kind).double()
    other = copy.deepcopy(model)
    mesh = cp.mesh_of(2, 2)
    zgraph.shard(model, mesh, context="cp")
    if is_checkpointed:
        model.gradient_checkpointing_enable()
        model.set_attn_implementation("zgraph")
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = torch.where(torch.arange(16) < torch.tensor([[5], [0]]), -100, tokens)
    other(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    run = with_fx(model) if compiled else model
    batch = zgraph.context_batch(
        model, {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    )
    run(**batch, use_cache=not is_checkpointed).loss.backward()
    gradients = [whole(one.grad) for one in model.parameters() if one.grad is not None]
    return cp.furthest(gradients, [one.grad for one in other.parameters() if one.grad is not None])


@worlds(2)
@pytest.mark.parametrize(
    ("kind", "is_checkpointed", "compiled"),
    [("llama", True, True), ("qwen3", False, True), ("llama", True, False), ("gpt2", False, True)],
)
def test_models_of_transformers_train_unmodified(
    ranks: Ranks, kind: str, is_checkpointed: bool, compiled: bool
) -> None:
    apart = ranks.run(_transformer_apart, kind, is_checkpointed, compiled)
    assert max(apart) <= EXACT, apart  # their fp32 losses and norms round alike


# --- loops of users ---------------------------------------------------------------------------------------------------


def _with_a_number() -> float:
    """A number of Python's that changes between steps, which Dynamo makes an input of the graph."""
    model, other = Scaled(), Scaled()
    for each in (model, other):
        each.load_state_dict(cp.started(cp.Case()).state_dict())
        each.double()
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    run, furthest, given = with_fx(model), 0.0, cp.batch(0, is_even=False)
    for scale in (1.0, 0.5, 0.25):
        model.scale = other.scale = scale
        run(**zgraph.context_batch(model, given)).backward()
        other(**given).backward()
        furthest = max(furthest, cp.furthest([whole(one) for one in _gradients(model)], _gradients(other)))
        model.zero_grad()
        other.zero_grad()
    return furthest


class Scaled(cp.Language):
    scale = 1.0

    def forward(self, x: Tensor, targets: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, targets, mask) * self.scale


def _with_a_tensor_hook() -> float:
    """A hook in forward that scales the gradient of attention's inputs, on the way through a ring."""
    case = cp.Case(key_heads=1)
    model, other = cp.started(case), cp.started(case)
    for each in (model, other):
        each.block.project.register_forward_hook(_halve_gradient)
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    given = cp.batch(0, is_even=False)
    with_fx(model)(**zgraph.context_batch(model, given)).backward()
    other(**given).backward()
    return cp.furthest([whole(one) for one in _gradients(model)], _gradients(other))


def _halve_gradient(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    result.register_hook(lambda grad: grad * 0.5)
    return result


def _in_lengths() -> float:
    """Batches of several lengths; one length comes again."""
    model = cp.started(cp.Case())
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    return _apart_in_gradients(model, with_fx(model), LENGTHS)


def _compiled_body() -> float:
    """The lines of the loss are compiled with the model."""
    model = cp.started(cp.Case())
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")

    def body(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), targets.flatten())

    return _apart_in_gradients(model, with_fx(body), LENGTHS[:1])


LENGTHS = (16, 12, 8, 12)


def _apart_in_gradients(model: nn.Module, run: Callable[..., Tensor], lengths: Sequence[int]) -> float:
    other, furthest = cp.started(cp.Case()), 0.0
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(cp.VOCABULARY, (2, length + 1), generator=generator)
        given = {"x": tokens[:, :-1], "targets": tokens[:, 1:]}
        run(**zgraph.context_batch(model, given)).backward()
        other(**given).backward()
        gradients = [[one.grad for one in each.parameters() if one.grad is not None] for each in (model, other)]
        furthest = max(furthest, cp.furthest([whole(one) for one in gradients[0]], gradients[1]))
        model.zero_grad()
        other.zero_grad()
    return furthest


def _in_sums() -> float:
    """A summed cross entropy, and gradients summed over the single rank of dp."""
    model, other = cp.started(cp.Case()), cp.started(cp.Case())
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp", reduction="sum")
    given = cp.batch(0, is_even=False)
    for each, batch in ((model, zgraph.context_batch(model, given)), (other, given)):
        each.reduction = "sum"
        each(**batch).backward()
    return cp.furthest([whole(one) for one in _gradients(model)], _gradients(other))


def _gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


@worlds(2)
@pytest.mark.parametrize(
    "loop", [_in_sums, _with_a_number, _with_a_tensor_hook, _in_lengths, _compiled_body], ids=lambda loop: loop.__name__
)
def test_loops_of_users(ranks: Ranks, loop: Callable[[], float]) -> None:
    assert max(ranks.run(loop)) <= EXACT


# --- refusals ---------------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """A model with one line that combines tokens."""

    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.embed = mix, nn.Embedding(cp.VOCABULARY, cp.WIDTH)
        self.conv, self.attention = nn.Conv1d(cp.WIDTH, cp.WIDTH, 3, padding=1), nn.MultiheadAttention(cp.WIDTH, 4)
        self.table = nn.Parameter(torch.randn(64, cp.WIDTH))
        self.register_buffer("angles", torch.randn(1, cp.LENGTH // 2, cp.WIDTH))
        self.norm = nn.BatchNorm1d(cp.LENGTH // 2)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return (self.mix(self, self.embed(x)) * targets.clamp(0)[..., None]).mean()


def _by_hand(model: Any, h: Tensor) -> Tensor:
    return (h @ h.transpose(1, 2)).softmax(-1) @ h


def _shifted(model: Any, h: Tensor) -> Tensor:
    return F.pad(h[:, 1:], (0, 0, 0, 1))


def _local_mask(model: Any, h: Tensor) -> Tensor:
    heads = h[:, None]
    mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[None, None])[:, 0]


def _cross(model: Any, h: Tensor) -> Tensor:
    keys = torch.ones(2, 1, 3, cp.WIDTH)
    return F.scaled_dot_product_attention(h[:, None], keys, keys)[:, 0]


def _flex(model: Any, h: Tensor) -> Tensor:
    one = h.detach()[:, None]  # torch has no gradients of it on CPUs
    return h + flex_attention(one, one, one)[:, 0]


MIXERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "by_hand": (_by_hand, "multiplies each token by others, as attention written by hand does"),
    "summed": (lambda model, h: h @ (h.transpose(1, 2) @ h), "sums products over this rank's tokens"),
    "convolution": (lambda model, h: model.conv(h.transpose(1, 2)).transpose(1, 2), "convolution"),
    "pooled": (lambda model, h: h + h.mean(1, keepdim=True), "reduces over this rank's tokens"),
    "cumulative": (lambda model, h: h.cumsum(1), "combines tokens"),
    "shifted": (_shifted, "selects some of this rank's tokens"),
    "reversed": (lambda model, h: h.flip(1), "reorders this rank's tokens"),
    "table": (lambda model, h: h + model.table[: h.shape[1]], "own value for each of 8 positions"),
    "buffer": (lambda model, h: h * model.angles, "own value for each of 8 positions"),
    "normalized": (lambda model, h: model.norm(h), "batch_norm"),
    "module": (lambda model, h: model.attention(h, h, h, need_weights=False)[0], "nn.MultiheadAttention"),
    "local_mask": (_local_mask, "a mask of shape [1, 1, 8, 8]"),
    "cross": (_cross, "8 queries and 3 keys"),
    "total": (lambda model, h: h / h.mean(), "uses a mean over this rank's tokens"),
    "sorted": (lambda model, h: h.sort(1)[0], "combines tokens"),
    "flex": (_flex, "flex_attention calls functions, which are not followed"),
    "unknown": (lambda model, h: torch.fft.fft(h, dim=1).real, "is not known to keep tokens apart"),
}


def _refusal(name: str, compiled: bool) -> str:
    model = Mixer(MIXERS[name][0])
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    given = zgraph.context_batch(model, cp.batch(0, is_even=True))
    try:
        (with_fx(model) if compiled else model)(**given)
    except zgraph.ZgraphError as error:
        return str(error)
    return "passed"


@worlds(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MIXERS)
def test_lines_that_combine_tokens_are_refused(ranks: Ranks, name: str, compiled: bool) -> None:
    first, second = ranks.run(_refusal, name, compiled)
    assert first == second
    assert MIXERS[name][1] in first


def _checkpointed() -> str:
    """Backward would compute the positions again, outside of any module."""

    def add(model: Any, h: Tensor) -> Tensor:
        return checkpoint(lambda h: h + model.table[torch.arange(h.shape[1])], h, use_reentrant=False)

    model = Mixer(add)
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    try:
        model(**zgraph.context_batch(model, cp.batch(0, is_even=True)))
    except zgraph.ZgraphError as error:
        return str(error)
    return "passed"


def test_what_backward_computes_again_lies_in_modules(ranks: Ranks) -> None:
    assert all("checkpoint of a function that calls arange" in found for found in ranks.run(_checkpointed))


def _in_parts() -> str:
    model = cp.started(cp.Case())
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    model.block.compile(backend="zgraph")
    try:
        model(**zgraph.context_batch(model, cp.batch(0, is_even=False)))
    except zgraph.ZgraphError as error:
        return str(error)
    return "passed"


def test_models_are_compiled_as_a_whole(ranks: Ranks) -> None:
    """Blocks compiled by themselves would run uncompiled, as all uncompiled forwards are followed."""
    assert all("block is compiled by itself" in found for found in ranks.run(_in_parts))


def _on_some_ranks() -> str:
    def attend_or_not(model: nn.Module, h: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            return F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        F.cross_entropy(h.flatten(0, 1), torch.zeros_like(h[..., 0], dtype=torch.int64).flatten())
        return h

    model = Mixer(attend_or_not)
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp", zero_stage=0)
    try:
        model(**zgraph.context_batch(model, cp.batch(0, is_even=True)))
    except zgraph.AgreementError as error:
        return str(error)
    return "passed"


def test_ranks_of_a_sequence_run_the_same_lines(ranks: Ranks) -> None:
    first, second = ranks.run(_on_some_ranks)
    assert "this rank calls attention" in first
    assert "this rank calls mean_cross_entropy" in second


def _second_part() -> str:
    """Two parts of a model, called one by one; the second combines tokens."""
    model = nn.Sequential(Mixer(lambda model, h: h), Mixer(lambda model, h: h.cumsum(1)))
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    given = zgraph.context_batch(model, cp.batch(0, is_even=True))
    model[0](**given)
    try:
        model[1](**given)
    except zgraph.ZgraphError as error:
        return str(error)
    return "passed"


def test_each_part_is_followed(ranks: Ranks) -> None:
    assert all("cumsum combines tokens" in found for found in ranks.run(_second_part))


def _broken() -> str:
    model = Mixer(lambda model, h: h[h.sum(-1) > 0].sum() + h)
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    try:
        with_fx(model)(**zgraph.context_batch(model, cp.batch(0, is_even=True)))
    except Exception as error:  # of Dynamo's
        return str(error)
    return "passed"


def test_graphs_do_not_break(ranks: Ranks) -> None:
    """Between graphs, nothing would see that a line combines tokens."""
    for found in ranks.run(_broken):
        assert "output shape depends on input Tensor data" in found
        assert "test_context.py" in found


def _not_cut() -> list[str]:
    model = cp.started(cp.Case())
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    other = zgraph.shard(nn.Linear(2, 2), init_device_mesh("cpu", (2,)))
    tokens = torch.randint(cp.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
    own = torch.full((2, 16), dist.get_rank())
    parallel = parallelize_module(nn.Linear(2, 2), init_device_mesh("cpu", (2,)), ColwiseParallel())
    calls: list[Callable[[], Any]] = [
        lambda: model(tokens),
        lambda: zgraph.context_batch(other, {"x": tokens}),
        lambda: zgraph.context_batch(model, {"x": tokens}),
        lambda: zgraph.context_batch(model, {"x": tokens, "targets": tokens}),
        lambda: zgraph.context_batch(model, {"x": own, "targets": targets}),
        lambda: zgraph.context_batch(model, {"x": tokens, "labels": targets}),
        lambda: zgraph.context_batch(model, {"x": tokens[:, :6], "targets": targets[:, :6]}),
        lambda: zgraph.context_batch(model, {"x": tokens, "targets": targets[:, :8]}),
        lambda: zgraph.context_batch(model, {"x": tokens, "targets": torch.tensor(0)}),
        lambda: zgraph.context_batch(model, {"x": tokens, "labels": tokens, "attention_mask": tokens > 5}),
        lambda: zgraph.context_batch(model, {}),
        lambda: model(zgraph.context_batch(model, {"x": tokens, "targets": targets})["x"]),
        lambda: with_fx(model)(zgraph.context_batch(model, {"x": tokens, "targets": targets})["x"]),
        lambda: (zgraph.context_batch(model, {"x": tokens, "targets": targets}), model(tokens, targets))[1],
        lambda: zgraph.shard(nn.Linear(2, 2), cp.mesh_of(2, 2), context="sp"),
        lambda: zgraph.shard(parallel, cp.mesh_of(2, 2), context="cp"),
        lambda: zgraph.PipelineStage(model, 0, 2, torch.device("cpu"), group=dist.group.WORLD),
        lambda: zgraph.training_step(model, torch.optim.SGD(model.parameters()))(
            lambda one: model(**zgraph.context_batch(model, {"x": one, "targets": targets}))
        )(tokens),
    ]
    found: list[str] = []
    for call in calls:
        try:
            call()
        except (zgraph.ZgraphError, ValueError) as error:
            found.append(str(error))
        else:
            found.append("passed")
    return found


def test_batches_that_are_not_cut_are_refused(ranks: Ranks) -> None:
    expected = [
        "cut the batch first",
        "has no context axis",
        "only x, and no targets",
        "x and targets are equal",
        "one context group [0, 1] were given different batches",
        "labels differ from the input tokens",
        "sequences of 6 tokens cannot be cut into two equal chunks for each of 2 ranks; pad them to 8",
        "different numbers of tokens",
        "targets is of shape []",
        "attention_mask marks padding",
        "an empty batch",
        "different numbers of targets in targets",
        "different numbers of targets in targets",
        "16 queries and 16 keys",
        "context='sp' is not among the mesh's axes ('dp', 'cp')",
        "context='cp' with a model that is tensor-parallel",
        "the stage has a context axis",
        "called inside a step that is captured",
    ]
    for found in ranks.run(_not_cut):
        assert len(found) == len(expected)
        for text, part in zip(found, expected, strict=True):
            assert part in text


def _of_copy() -> float:
    case = cp.Case()
    model = cp.started(case)
    zgraph.shard(model, cp.mesh_of(2, 2), context="cp")
    copied, given = copy.deepcopy(model), cp.batch(0, is_even=False)
    copied(**zgraph.context_batch(copied, given)).backward()
    other = cp.started(case)
    other(**given).backward()
    gradients = [[one.grad for one in model.parameters() if one.grad is not None] for model in (copied, other)]
    return cp.furthest([whole(one) for one in gradients[0]], gradients[1])


def test_a_copy_has_the_axis(ranks: Ranks) -> None:
    assert max(ranks.run(_of_copy)) < EXACT
