"""`zgraph.materialize`: a model built on the meta device ends up, bitwise, as if it had been initialised whole."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import zgraph
from examples.benchmarks.heap import Heap, HeapPeak
from tests.support import models
from tests.support.compiled import with_fx
from tests.support.memory.heap_peak import SLACK_BYTES, WIDTH, Peak
from tests.support.ranks import Ranks, every_world
from tests.support.whole_tensors import whole

SEED = 11
Init = Callable[[nn.Module], object]


class Rotary(nn.Module):
    """Buffers that only a constructor could compute, were it not for reset_parameters; one is not in the state_dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("frequencies", torch.empty(width))
        self.register_buffer("noise", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequencies = 100.0 ** -(torch.arange(self.width) / self.width)  # assigned, not written in place
        self.noise.uniform_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.frequencies + self.noise


class Convolution(nn.Conv2d):
    """Draws its weight by index, not in the order of memory: nn.Conv2d does so from torch 2.12 on."""

    def reset_parameters(self) -> None:
        drawn = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
        nn.init.kaiming_uniform_(drawn)
        with torch.no_grad():
            self.weight.copy_(drawn)
        nn.init.uniform_(self.bias)


class Mixed(nn.Module):
    """Its children's usual ways to initialise, and parameters of its own: a 0-d one, a short one, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, padding_idx=2)
        self.rotary = Rotary(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)  # zeroes a bias of its child
        self.norm = nn.BatchNorm1d(6)
        self.convolution = Convolution(3, 5, 2).to(memory_format=torch.channels_last)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 5))
        self.gain = nn.Parameter(torch.empty(1))
        self.shift = nn.Parameter(torch.empty(()))
        self.frozen = nn.Parameter(torch.empty(3, 5), requires_grad=False)
        self.frozen.group_of_mine = "special"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain)
        nn.init.normal_(self.shift)
        nn.init.orthogonal_(self.frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rotary(self.embed(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.flatten(0, 1)).view_as(x)
        image = x.flatten()[:48].view(1, 3, 4, 4)
        x = self.layers(x).mean((0, 1)) + self.convolution(image).mean((0, 2, 3))
        return x @ self.frozen.t() * self.gain + self.shift


def reset(module: nn.Module) -> None:
    """What materialize does by default, for `nn.Module.apply`."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if method is not None:
        method()


@torch.no_grad()
def by_type(module: nn.Module) -> None:
    """As the documentation of nn.Module.apply writes it; visits containers too."""
    if type(module) is nn.Linear:
        module.weight.normal_(0.0, 0.02)
        if module.bias is not None:
            module.bias.data.fill_(0.1)
    elif type(module) is nn.Embedding:
        module.weight.data = torch.randn_like(module.weight)
    elif type(module) is nn.LayerNorm:
        module.weight = nn.Parameter(torch.rand(module.weight.shape))
        nn.init.zeros_(module.bias)
    elif isinstance(module, models.Language):
        module.temperature.copy_(torch.tensor(1.25))


@torch.no_grad()
def rescaling(module: nn.Module) -> None:
    """As Hugging Face GPT-2: parents reach for what their children have drawn, and one reads another's."""
    by_type(module)
    for name, parameter in module.named_parameters():
        if name in ("out.weight", "down.weight"):
            nn.init.normal_(parameter, std=0.01)
    if isinstance(module, models.Language):
        for block in module.blocks:
            block.up.weight.mul_(0.5)
            block.qkv.weight[3:5].add_(block.out.weight[:2])
        module.blocks[1].down.weight.view(-1)[::3].copy_(module.blocks[0].down.weight.view(-1)[::3])


@torch.no_grad()
def from_the_top(module: nn.Module) -> None:
    """The root initialises everything, in an order of its own."""
    if isinstance(module, models.Language):
        for name, parameter in reversed(list(module.named_parameters())):
            parameter.fill_(1.0) if "norm" in name else nn.init.trunc_normal_(parameter, std=0.05)


CASES: dict[str, tuple[Callable[[], nn.Module], Init | None]] = {
    "constructor": (Mixed, None),
    "types": (models.Language, by_type),
    "rescaling": (models.Language, rescaling),
    "top": (models.Language, from_the_top),
    "apply": (Mixed, reset),
}


def built(case: str, options: dict[str, Any], meta: bool, seed: int | None = None) -> nn.Module:
    """The model, sharded; both ways begin to draw at the state that torch.manual_seed(SEED) leaves."""
    build, init = CASES[case]
    if meta:
        with torch.device("meta"):
            model = build()
        zgraph.shard(model, **options)
        before = dict(model.named_parameters())
        assert zgraph.materialize(model, init, seed=seed) is model
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        return model
    state = torch.get_rng_state()
    model = build()
    if init is not None:
        torch.set_rng_state(state)  # the constructor's own draws are not part of what is compared
        model.apply(init)
    return zgraph.shard(model, **options)


def assert_same_tensor(name: str, found: Tensor, expected: Tensor) -> None:
    assert type(found) is type(expected), name
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype), name
    assert found.device == expected.device and found.requires_grad == expected.requires_grad, name
    if isinstance(found, DTensor) and isinstance(expected, DTensor):
        assert (found.placements, found.device_mesh) == (expected.placements, expected.device_mesh), name
        found, expected = found.detach().to_local(), expected.detach().to_local()
        assert found.stride() == expected.stride(), name
    assert torch.equal(found, expected), name
    # Scattered shards may lie in a padded buffer.
    assert found.untyped_storage().nbytes() <= expected.untyped_storage().nbytes(), name


def assert_same_model(found: nn.Module, expected: nn.Module, marks: bool = True) -> None:
    """Parameters, buffers, classes; and `marks`: attributes of parameters, to which torch.compile adds its own."""
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert list(ours) == list(theirs)
        for name, tensor in ours.items():
            assert_same_tensor(name, tensor, theirs[name])
            assert not marks or vars(tensor).keys() == vars(theirs[name]).keys(), name
    assert list(found.state_dict()) == list(expected.state_dict())
    assert [type(part) for part in found.modules()] == [type(part) for part in expected.modules()]


def same_as_whole(case: str, options: dict[str, Any], mode: str, offset: int) -> bool:
    """Materialized against whole: parameters, buffers, what is drawn next, and two steps of training."""
    rank = dist.get_rank()
    torch.manual_seed(SEED + offset * rank)
    expected = built(case, options, meta=False)
    next_expected = torch.rand(3)
    torch.manual_seed(SEED + offset * rank)
    found = built(case, options, meta=True)
    assert torch.equal(torch.rand(3), next_expected)
    assert_same_model(found, expected)
    torch.manual_seed(100 + rank)
    tokens = torch.randint(13, (2, 4))
    for model in (found, expected):
        called = with_fx(model) if mode == "fx" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            called(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(found, expected, marks=mode == "eager")
    return True


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
@every_world
def test_materialized_equals_initialised_whole_and_sharded(ranks: Ranks, case: str, zero_stage: int) -> None:
    assert all(ranks.run(same_as_whole, case, {"zero_stage": zero_stage}, "eager", 0))


@pytest.mark.parametrize(
    ("case", "options"),
    [("constructor", {}), ("rescaling", {"param_dtype": torch.bfloat16})],  # which eager mode has
    ids=str,
)
def test_materialized_equals_whole_compiled(ranks: Ranks, case: str, options: dict[str, Any]) -> None:
    assert all(ranks.run(same_as_whole, case, options, "fx", 0))


@pytest.mark.parametrize("case", CASES)
@every_world
def test_ranks_get_rank_zeros_draws_and_keep_their_stream(ranks: Ranks, case: str) -> None:
    """Each rank starts from another random state; as after a whole init, it then draws on from its own."""
    assert all(ranks.run(same_as_whole, case, {}, "eager", 5))


def tied() -> bool:
    torch.manual_seed(SEED)
    expected = Tied()
    torch.manual_seed(SEED)
    expected.apply(reset)
    zgraph.shard(expected)
    torch.manual_seed(SEED)
    with torch.device("meta"):
        found = zgraph.shard(Tied())
    zgraph.materialize(found)
    assert found.head.weight is found.embed.weight
    assert_same_model(found, expected)
    return True


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight


@every_world
def test_tied_parameter_gets_last_modules_values_as_under_apply(ranks: Ranks) -> None:
    assert all(ranks.run(tied))


def seeded() -> bool:
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    expected = built("constructor", {}, meta=False)
    then = torch.rand(2)
    torch.manual_seed(1000 + rank)
    found = built("constructor", {}, meta=True, seed=SEED)
    assert_same_model(found, expected)
    assert torch.equal(torch.rand(2), then)
    return True


def test_a_seed_is_that_of_manual_seed(ranks: Ranks) -> None:
    assert all(ranks.run(seeded))


def ignored_ones() -> bool:
    torch.manual_seed(SEED)
    expected = Mixed()
    zgraph.shard(expected, ignored=[expected.layers[0], expected.gain])
    torch.manual_seed(SEED)
    with torch.device("meta"):
        found = Mixed()
    zgraph.shard(found, ignored=[found.layers[0], found.gain])
    zgraph.materialize(found)
    assert found.layers[0].weight.placements == (Replicate(),)
    assert_same_model(found, expected)
    return True


def test_ignored_parameters_start_from_the_same_draws(ranks: Ranks) -> None:
    assert all(ranks.run(ignored_ones))


class Dropped(nn.Module):
    """Draws without an in-place fill: random masks, a permutation, a mask in place, its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(F.dropout(torch.ones(6, 5), 0.3))
            self.weight[:, 0] = torch.randperm(6).float()
            self.weight.sub_(1).uniform_(-1, 1)
            F.dropout(self.weight, 0.3, inplace=True)
            if not self.weight.is_meta:
                self.weight[0].uniform_(generator=torch.Generator().manual_seed(3))


def functional_draws() -> bool:
    rank = dist.get_rank()
    torch.manual_seed(SEED + rank)
    expected = zgraph.shard(Dropped())
    then = torch.rand(2)
    torch.manual_seed(SEED + rank)
    with torch.device("meta"):
        found = zgraph.shard(Dropped())
    zgraph.materialize(found)
    assert_same_model(found, expected)
    assert torch.equal(torch.rand(2), then)
    return True


def test_draws_of_every_kind_are_shared(ranks: Ranks) -> None:
    assert all(ranks.run(functional_draws))


# --- partly on meta, and in other orders ----------------------------------------------------------------------------


class Finetuned(nn.Module):
    """A trunk with values, a head without; the root initialises both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with torch.device("meta"):
            self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def partly_on_meta() -> bool:
    torch.manual_seed(1)
    model = zgraph.shard(Finetuned())
    kept = {name: whole(tensor.detach()).clone() for name, tensor in model.trunk.state_dict().items()}

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if isinstance(module, Finetuned):
            nn.init.zeros_(module.trunk[0].weight)
            module.head.bias.copy_(module.trunk[0].bias[:3] + 1)

    torch.manual_seed(SEED)
    zgraph.materialize(model, init)
    torch.manual_seed(SEED)
    expected = nn.Linear(4, 3)
    assert torch.equal(whole(model.head.weight.detach()), expected.weight)
    # What the root wrote to the trunk is read by it, and then gone; its values before are what the head was given.
    assert torch.equal(whole(model.head.bias.detach()), kept["0.bias"][:3] + 1)
    for name, tensor in model.trunk.state_dict().items():
        assert torch.equal(whole(tensor.detach()), kept[name]), name
    assert isinstance(model(torch.randn(4, 4)), Tensor)
    return True


@every_world
def test_parameters_that_had_values_keep_them(ranks: Ranks) -> None:
    assert all(ranks.run(partly_on_meta))


def nothing_on_meta() -> bool:
    model = zgraph.shard(nn.Linear(4, 4))
    before = whole(model.weight.detach()).clone()
    state = torch.get_rng_state()
    calls: list[nn.Module] = []
    zgraph.materialize(model, calls.append, seed=4)
    assert calls == [] and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(whole(model.weight.detach()), before)
    return zgraph.materialize(plain := nn.Linear(2, 2)) is plain


def test_with_nothing_on_meta_nothing_happens(ranks: Ranks) -> None:
    assert ranks.run(nothing_on_meta) == [True, True]


def compiled_and_optimizer_before(forgotten: bool) -> bool:
    torch.manual_seed(SEED)
    expected = zgraph.shard(models.Uneven())
    with torch.device("meta"):
        model = zgraph.shard(models.Uneven())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    compiled = with_fx(model)
    if forgotten:
        with pytest.raises(Exception, match=r"meta device.*zgraph\.materialize\(model\)"):
            compiled(torch.ones(3, 6))

    def init(module: nn.Module) -> None:
        reset(module)
        if isinstance(module, models.Uneven):
            nn.init.ones_(module.gain)
            nn.init.constant_(module.shift, 0.5)

    assert zgraph.materialize(compiled, init, seed=SEED) is compiled
    expected_optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(3, 6)
    for called, stepped in ((compiled, optimizer), (with_fx(expected), expected_optimizer)):
        called(x).square().mean().backward()
        stepped.step()
    assert_same_model(model, expected, marks=False)
    return True


@pytest.mark.parametrize("forgotten", [True, False])  # a shorter way than the other
def test_compiled_and_given_to_an_optimizer_before(ranks: Ranks, forgotten: bool) -> None:
    """Also when the compiler has met the model on the meta device, and refused it."""
    assert all(ranks.run(compiled_and_optimizer_before, forgotten))


def replaced_under_an_optimizer() -> str:
    import weakref

    with torch.device("meta"):
        model = zgraph.shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = weakref.ref(model.weight)
    zgraph.materialize(model)
    assert not model.weight.is_meta and reference() is not model.weight
    with pytest.raises(zgraph.ZgraphError) as caught:
        model(torch.ones(2, 4))
    del optimizer
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    return str(caught.value)


def test_old_optimizer_is_refused_if_parameter_object_changed(ranks: Ranks) -> None:
    for text in ranks.run(replaced_under_an_optimizer):
        assert re.search(r"optimizer .* still holds weight, which .*materialize.*Create the optimizer after", text)


# --- errors ---------------------------------------------------------------------------------------------------------


class Ownerless(nn.Module):
    """Parameters and a buffer that only the constructor knows the values of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) @ self.mask


class Attributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.positions = torch.arange(4)


def on_meta(build: Callable[[], nn.Module] = Ownerless, sharded: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = build()
    return zgraph.shard(model) if sharded else model


@torch.no_grad()
def complete(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()
    if isinstance(module, Ownerless):
        module.scale.normal_()
        module.mask.copy_(torch.tril(torch.ones(4, 4)))


def without_buffer(module: nn.Module) -> None:
    complete(module)
    if isinstance(module, Ownerless):
        module.mask = torch.empty(4, 4, device="meta")


def without_bias(module: nn.Module) -> None:
    if isinstance(module, Ownerless):
        complete(module)
        nn.init.zeros_(module.inner.weight)


def in_part(module: nn.Module) -> None:
    complete(module)
    if isinstance(module, nn.Linear):
        module.weight.fill_(torch.nan)
        module.weight[1:].zero_()


def too_early(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.mul_(0.5)
        nn.init.zeros_(module.bias)
    else:
        complete(module)


def resized(module: nn.Module) -> None:
    complete(module)
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.ones(5, 4))


def failing(module: nn.Module) -> None:
    complete(module)
    if isinstance(module, Ownerless):
        raise KeyError("on purpose")


def untied(module: nn.Module) -> None:
    reset(module)
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.ones(7, 4))


SCENARIOS: dict[str, Callable[[], object]] = {
    "eager": lambda: on_meta()(torch.ones(2, 4)),
    "compiled": lambda: with_fx(on_meta())(torch.ones(2, 4)),
    "no_reset": lambda: zgraph.materialize(on_meta()),
    "buffer": lambda: zgraph.materialize(on_meta(), without_buffer),
    "bias": lambda: zgraph.materialize(on_meta(), without_bias),
    "in_part": lambda: zgraph.materialize(on_meta(), in_part),
    "too_early": lambda: zgraph.materialize(on_meta(), too_early),
    "resized": lambda: zgraph.materialize(on_meta(), resized),
    "untied": lambda: zgraph.materialize(on_meta(Tied), untied),
    "failing": lambda: zgraph.materialize(on_meta(), failing),
    "attribute": lambda: zgraph.materialize(on_meta(Attributed)),
    "unsharded": lambda: zgraph.materialize(on_meta(sharded=False)),
}

EXPECTED = {
    "eager": r"ZgraphError: .*scale is on the meta device.*call zgraph\.materialize\(model\)",
    "compiled": r"scale is on the meta device.*call zgraph\.materialize\(model\)",
    "no_reset": r"ZgraphError: .*left without a value: scale \(parameter of Ownerless, which has no reset_parameters\)"
    r", mask \(buffer of Ownerless, .*Give the module a reset_parameters .* or pass init=",
    "buffer": r"ZgraphError: .*init has replaced the buffer mask by another one on the meta device",
    "bias": r"ZgraphError: .*init left without a value: inner\.bias \(parameter of Linear\).*call "
    r"module\.reset_parameters\(\)",
    "in_part": r"ZgraphError: .*init wrote inner\.weight \(parameter of Linear\) only in part.*NaN",
    "too_early": r"ZgraphError: .*init wrote inner\.weight .*computed it from a tensor without values.*NaN",
    "resized": r"ZgraphError: .*replaced inner\.weight \(\[4, 4\] torch\.float32, .*by \[5, 4\] .*in place",
    "untied": r"ZgraphError: .*replaced embed\.weight \(\[7, 4\] torch\.float32, read in 2 places\)",
    "failing": r"KeyError: 'on purpose'.*while initialising the model itself \(Ownerless\)",
    "attribute": r"ZgraphError: .*: positions is a plain attribute on the meta device.*register it as a buffer",
    "unsharded": r"ZgraphError: .*scale is on the meta device and not sharded; call zgraph\.shard\(model\) first",
}


def message_of(scenario: str) -> str:
    try:
        SCENARIOS[scenario]()
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        return "\n".join([f"{type(inner).__name__}: {inner}", *getattr(error, "__notes__", [])])
    return "nothing was raised"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_message_says_what_was_found_and_what_to_do(ranks: Ranks, scenario: str) -> None:
    for text in ranks.run(message_of, scenario):
        assert re.search(EXPECTED[scenario], text, re.DOTALL), text


def again_after(init_name: str) -> bool:
    torch.manual_seed(SEED)
    model = on_meta()
    classes = [type(part) for part in model.modules()]
    before = [*model.parameters(), *model.buffers()]
    state = torch.get_rng_state()
    init = {"failing": failing, "in_part": in_part, "without_bias": without_bias, "resized": resized}[init_name]
    with pytest.raises((KeyError, zgraph.ZgraphError)):
        zgraph.materialize(model, init)
    after = [*model.parameters(), *model.buffers()]
    assert all(ours is theirs and ours.is_meta for ours, theirs in zip(after, before, strict=True))
    assert [type(part) for part in model.modules()] == classes
    assert torch.equal(torch.get_rng_state(), state)
    zgraph.materialize(model, complete)
    torch.set_rng_state(state)
    expected = Ownerless()
    torch.set_rng_state(state)
    expected.apply(complete)
    assert_same_model(model, zgraph.shard(expected))
    return True


@pytest.mark.parametrize("init_name", ["failing", "in_part", "without_bias", "resized"])
def test_after_a_failure_the_call_can_be_repeated(ranks: Ranks, init_name: str) -> None:
    assert all(ranks.run(again_after, init_name))


# --- memory ---------------------------------------------------------------------------------------------------------

LAYERS = 8


class Deep(nn.Module):
    """Equal layers, the last of them tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS + 1))
        self.layers[LAYERS].weight = self.layers[0].weight


@torch.no_grad()
def scaled_twice(module: nn.Module) -> None:
    """Each layer is drawn, and drawn again by the root."""
    if isinstance(module, nn.Linear):
        module.weight.normal_()
    else:
        for parameter in module.parameters():
            parameter.uniform_(-1, 1)


def peak_bytes(zero_stage: int, init: Init | None, offset: int) -> dict[str, int]:
    """Over a first call, which allocates what torch and gloo keep, a second one is measured."""
    found: dict[str, int] = {}
    for _ in range(2):
        torch.manual_seed(SEED + offset * dist.get_rank())
        with torch.device("meta"):
            model = zgraph.shard(Deep(), zero_stage=zero_stage)
        with HeapPeak(Heap()) as sampled, Peak() as peak:
            zgraph.materialize(model, init)
        rest = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
        found = {"peak": peak.rise_bytes, "sampled": sampled.rise_bytes, "rest": rest}
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_peak_memory_is_all_shards_and_one_unit(world: int) -> None:
    """At stages 0 and 3, drawn once and twice, from one random state and from one a rank; in processes of its own."""
    unit = 4 * WIDTH * WIDTH
    with contextlib.closing(Ranks(world)) as ranks:
        for zero_stage, init, offset in itertools.product([0, 3], [None, scaled_twice], [0, 1]):
            parts = world if zero_stage == 3 else 1
            for found in ranks.run(peak_bytes, zero_stage, init, offset):
                assert found["rest"] == LAYERS * unit // parts
                limit = found["rest"] + (unit if parts > 1 else 0) + SLACK_BYTES
                assert found["rest"] <= found["peak"] <= limit
                assert found["sampled"] <= limit
