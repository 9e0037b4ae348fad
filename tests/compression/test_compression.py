"""Compression methods: their checks, their text, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from zgraph.compression.low_rank import LowRank
from zgraph.compression.method_text import from_text, kind_of, to_text
from zgraph.compression.methods import (
    BlockMethod,
    CompressionMethod,
    ErrorFeedback,
    LoCo,
    NoFeedback,
    RngKey,
    TensorMethod,
    TwoHop,
)
from zgraph.compression.payload import BucketLayout
from zgraph.passes import CompressGradients

METHODS = [
    LoCo(),
    LoCo(bits=2, beta=0.5, reset_every=0, hops=2, error_dtype=torch.float32, error_device="cpu"),
    LoCo(bits=8, group=1024, rotate=False, clip_search=False, hops=1),
    ErrorFeedback(),
    NoFeedback(bits=8, group=512),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LoCo, {"bits": 3}, "LoCo: bits=3 do not fill whole bytes; write 2, 4 or 8"),
        (LoCo, {"bits": 16}, "bits=16"),
        (LoCo, {"group": 100}, "group=100; a group is a power of two from 8 to 1024"),
        (LoCo, {"group": 2048}, "group=2048"),
        (NoFeedback, {"group": 4}, "NoFeedback: group=4"),
        (NoFeedback, {"group": 0}, "group=0"),
        (NoFeedback, {"group": -8}, "group=-8"),
        (LoCo, {"group": 16}, "group=16 is smaller than the 32 elements .* write group=32 or more, or rotate=False"),
        (ErrorFeedback, {"error_dtype": torch.bfloat16}, "error_dtype=torch.bfloat16; write torch.int8 or"),
        (ErrorFeedback, {"error_device": "cuda"}, "error_device='cuda'; write None or"),
        (LoCo, {"beta": 1.0}, "beta=1.0; write a number from 0 up to, not including, 1"),
        (LoCo, {"beta": -0.1}, "beta=-0.1"),
        (LoCo, {"beta": float("nan")}, "beta=nan"),
        (LoCo, {"reset_every": -1}, "reset_every=-1"),
        (LoCo, {"hops": 3}, "hops=3"),
        (TwoHop, {"ranks_per_host": 0}, "ranks_per_host=0; write the number of ranks on a host"),
    ],
)
def test_options_that_do_not_fit_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_options_at_the_edge_are_taken() -> None:
    for method in (LoCo(group=32), LoCo(group=1024), LoCo(group=8, rotate=False), LoCo(beta=0), LoCo(reset_every=0)):
        assert from_text(to_text(method)) == method
    with pytest.raises(FrozenInstanceError):
        LoCo().bits = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_reset_interval_is_counted_in_steps() -> None:
    assert LoCo().reset_interval == 1024 and LoCo(reset_every=7).reset_interval == 7
    assert ErrorFeedback().reset_interval == 0 and NoFeedback().reset_interval == 0


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_method_survives_as_text(method: CompressionMethod) -> None:
    text = to_text(method)
    assert from_text(text) == method and type(from_text(text)) is type(method)
    assert to_text(from_text(text)) == text
    assert from_text(text) != replace(method, error_device=None if "cpu" in text else "cpu")


@dataclass(frozen=True, kw_only=True)
class Bytes(CompressionMethod):
    """As much of a method as texts need."""

    def sections(self, numel: int) -> tuple[int, ...]:
        return (numel,)


@dataclass(frozen=True, kw_only=True)
class OwnMethod(Bytes):
    """A user's, with a field of each kind."""

    name: ClassVar[str] = "tests.own"
    label: str = "torch.int8"  # no dtype
    share: float = 0.25
    rounds: bool = True
    count: int = 3
    dtype: torch.dtype = torch.float16
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class HoldsTensor(Bytes):
    name: ClassVar[str] = "tests.holds_tensor"
    table: Tensor = field(default_factory=lambda: torch.zeros(2))


def test_methods_of_users_survive_as_text() -> None:
    for method in (OwnMethod(), OwnMethod(label='"quotes", [brackets]', share=1e-300, rounds=False, device="cpu")):
        again = from_text(to_text(method))
        assert again == method and isinstance(again, OwnMethod) and type(again.rounds) is bool


def test_methods_that_no_text_can_hold() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Inherits(OwnMethod):
        """Its class would come back as the one that it inherits from."""

    with pytest.raises(ValueError, match=r"Inherits has no name.*write name: ClassVar\[str\]"):
        to_text(Inherits())
    with pytest.raises(ValueError, match=r"HoldsTensor\.table is a Tensor, which a compiled graph cannot hold"):
        to_text(HoldsTensor())


def local(called: str) -> CompressionMethod:
    """A method of a class that is defined by this call."""

    @dataclass(frozen=True, kw_only=True)
    class Local(Bytes):
        name: ClassVar[str] = called
        count: int = 3

    return Local()


def test_texts_do_not_contain_class_or_module_names() -> None:
    assert to_text(NoFeedback(bits=8)).startswith('["NoFeedback", {"bits": 8, ')
    method = local("tests.moved")
    text = to_text(method)
    assert text == '["tests.moved", {"count": 3}]' and kind_of(text) is type(method)
    type(method).__qualname__, type(method).__module__ = "Moved", "elsewhere"
    assert to_text(method) == text and from_text(text) == method


def test_a_class_that_is_defined_again_replaces_the_one_before() -> None:
    first, second = local("tests.twice"), local("tests.twice")
    assert kind_of(to_text(second)) is type(second)
    with pytest.raises(ValueError, match=r"'tests\.twice', was defined again since this method was made"):
        to_text(first)


def test_names_that_are_unknown_or_taken_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no compression method is named 'gone' here, only ErrorFeedback, .*; import"):
        from_text('["gone", {}]')
    with pytest.raises(ValueError, match="no compression method is named 'LowRank'"):
        from_text('["LowRank", {"rank": 2}]')
    texts = ('["gone", {}]', "damaged", "3", '["LowRank", {}]')
    assert [kind_of(text) for text in texts] == [None, None, None, LowRank]
    first, second = local("tests.taken"), local("tests.taken")
    type(second).__qualname__ = "Taken"
    for method in (first, second):
        with pytest.raises(ValueError, match=r"Local and .*Taken are both named 'tests\.taken'.*another name"):
            to_text(method)


def test_an_unfinished_method_cannot_be_made() -> None:
    """And no method has one that it cannot honour: kernels compute a BlockMethod."""

    @dataclass(frozen=True, kw_only=True)
    class Unfinished(TensorMethod):
        def quantize(self, grad: Tensor, state: dict[str, Tensor], draw: RngKey, rank: int) -> Sequence[Tensor]:
            return [grad]

    with pytest.raises(TypeError, match=r"abstract class Unfinished .*dequantize_sum.*sections"):
        Unfinished()  # pyright: ignore[reportAbstractUsage]
    assert OwnMethod().state(10, 2) == {} and OwnMethod().reset_interval == 0
    assert not hasattr(BlockMethod, "quantize") and not hasattr(BlockMethod, "dequantize_sum")
    with pytest.raises(ValueError, match=r"method=OwnMethod\(.*\) is not a compression method.*a subclass of zgraph"):
        CompressGradients(method=OwnMethod())


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_bytes_of_a_chunk(method: BlockMethod, numel: int) -> None:
    """Codes of whole groups, and two bytes for each group; the error has an element for each code."""
    codes, scales = method.sections(numel)
    groups = scales // 2
    assert (groups - 1) * method.group < numel <= groups * method.group
    assert 8 * codes == method.bits * groups * method.group
    kept = method.state(numel, 5)
    if method.residual_decay is None:
        assert kept == {}
        return
    assert kept.pop("error") == ((5, groups, method.group), method.error_dtype)
    assert kept == ({"error_scale": ((5, groups), torch.bfloat16)} if method.error_dtype == torch.int8 else {})


@pytest.mark.parametrize("stretches", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_views_share_a_row_without_gaps(world: int, stretches: int) -> None:
    """Each byte of a row belongs to one view; only the last few, which align it, to none. Codes lie before scales."""
    layout = BucketLayout(LoCo(), (1, 128, 129, 1000), world, stretches)
    payload = torch.zeros(world, layout.payload_bytes, dtype=torch.uint8)
    views = list(layout.views(payload))
    for numel, sections in zip(layout.numels, views, strict=True):
        for view, size in zip(sections, layout.method.sections(numel), strict=True):
            assert view.shape == (world, stretches, size)
            view += 1
    used = payload[0].sum().item()
    assert torch.equal(payload, (torch.arange(layout.payload_bytes) < used).to(torch.uint8).expand(world, -1))
    assert layout.payload_bytes % 16 == 0 and layout.payload_bytes - used < 16
    last_code = max(offsets[0] for offsets in layout.offsets())
    assert all(offsets[1] > last_code for offsets in layout.offsets())
