"""Handles carry a parameter's name."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zgraph.handle import HANDLE_BYTES, make_handle, name_of


@pytest.mark.parametrize("name", ["weight", "h.11.attn.qkv.weight", "größe.w", "x" * HANDLE_BYTES])
def test_a_name_comes_back(name: str) -> None:
    handle = make_handle(name)
    assert handle.shape == (HANDLE_BYTES,) and handle.dtype == torch.uint8
    assert name_of(handle) == name


def test_a_long_name_keeps_its_end() -> None:
    name = "a." * 80 + "weight"
    assert name_of(make_handle(name)) == "..." + name[3 - HANDLE_BYTES :]
    assert make_handle(name).shape == (HANDLE_BYTES,)


def test_what_is_no_handle_has_no_name() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(make_handle("weight"))
    for other in (fake, torch.ones(HANDLE_BYTES), torch.ones(3, dtype=torch.uint8), None, "weight"):
        assert name_of(other) == "?"
