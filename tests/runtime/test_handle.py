"""Handles carry a parameter's name."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.compiled import with_fx
from zgraph.runtime.handle import HANDLE_BYTES, make_handle, name_of


@pytest.mark.parametrize("name", ["weight", "h.11.attn.qkv.weight", "größe.w", "x" * HANDLE_BYTES])
def test_a_name_comes_back(name: str) -> None:
    handle = make_handle(name)
    assert handle.shape == (HANDLE_BYTES,) and handle.dtype == torch.uint8
    assert name_of(handle) == name


def test_a_long_name_keeps_its_end() -> None:
    name = "a." * 80 + "weight"
    assert name_of(make_handle(name)) == "..." + name[3 - HANDLE_BYTES :]
    assert make_handle(name).shape == (HANDLE_BYTES,)


def test_non_handle_has_no_name() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(make_handle("weight"))
    for other in (fake, torch.ones(HANDLE_BYTES), torch.ones(3, dtype=torch.uint8), None, "weight"):
        assert name_of(other) == "?"


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(8, 12, dtype=torch.uint8),
        make_handle("weight").to("meta"),
        make_handle("weight").to_sparse(),
        torch.nn.Parameter(make_handle("weight"), requires_grad=False),
    ],
    ids=["two dims", "meta", "sparse", "parameter"],
)
def test_tensor_resembling_a_handle_has_no_name(other: torch.Tensor) -> None:
    assert other.dtype == torch.uint8 and other.numel() == HANDLE_BYTES
    assert name_of(other) == "?"


def test_an_input_as_large_as_a_handle_is_an_input() -> None:
    torch.compiler.reset()
    image = torch.arange(HANDLE_BYTES, dtype=torch.uint8).reshape(8, 12)
    model = torch.nn.Linear(12, 3)
    compiled = with_fx(lambda x: model(x.float()))
    assert torch.equal(compiled(image), model(image.float()))


def test_all_handles_are_of_one_size() -> None:
    names = ["", "w", "x" * HANDLE_BYTES, "x" * (HANDLE_BYTES + 1), "größe." * 40]
    assert {tuple(make_handle(name).shape) for name in names} == {(HANDLE_BYTES,)}


def test_a_name_cut_within_a_letter_is_still_readable() -> None:
    cut = make_handle("ö" * 60 + ".weights")  # 93 bytes remain: half a letter, 42 letters, ".weights"
    assert name_of(cut) == "...\ufffd" + "ö" * 42 + ".weights"
