"""Differences between frames that their keys must show, and frames without a key."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.decomposition import decompositions
from torch.utils.checkpoint import checkpoint

from zgraph.driver.saved_plans.key import NotKeyed, key_of
from zgraph.graph import nodes
from zgraph.passes import presets
from zgraph.torch_compat.dynamo import dynamo_fake
from zgraph.torch_compat.fake_values import fake_mode

Frame = tuple[fx.GraphModule, list[Any]]


def frame_of(function: Callable[..., Any], *args: Any) -> Frame:
    """Dynamo's graph of a function, with the inputs that AOTAutograd would trace."""
    found: list[Frame] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append((gm, [dynamo_fake(node) for node in gm.graph.find_nodes(op="placeholder")]))
        return gm

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*args)
    (frame,) = found
    return frame


def key(function: Callable[..., Any], *args: Any, **facts: object) -> str:
    gm, inputs = frame_of(function, *args)
    return key_of(gm, inputs, facts)


def scaled(x: Tensor) -> Tensor:
    return (x * 0.5).relu()


def scaled_more(x: Tensor) -> Tensor:
    return (x * 0.25).relu()


def with_constant(x: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0])


def with_other_constant(x: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 3.0])


def inner(x: Tensor) -> Tensor:
    return x.sin().exp()


def other_inner(x: Tensor) -> Tensor:
    return x.cos().exp()


def in_region(x: Tensor) -> Tensor:
    return checkpoint(inner, x, use_reentrant=False)


def in_other_region(x: Tensor) -> Tensor:
    return checkpoint(other_inner, x, use_reentrant=False)


X = torch.ones(3, 2)


def test_a_frame_has_the_same_key_each_time() -> None:
    assert key(scaled, X, passes=presets.default()) == key(scaled, X.clone(), passes=presets.default())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((scaled, X), (scaled_more, X)),
        ((with_constant, X), (with_other_constant, X)),
        ((in_region, X), (in_other_region, X)),
        ((scaled, X), (scaled, torch.ones(4, 2))),
        ((scaled, X), (scaled, torch.ones(2, 3).t())),
        ((scaled, X), (scaled, X.bfloat16())),
        ((scaled, X), (scaled, X.clone().requires_grad_())),
    ],
)
def test_keys_of_different_frames_differ(one: Any, other: Any) -> None:
    assert key(*one) != key(*other)


@contextlib.contextmanager
def without_flash() -> Any:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        torch.no_grad,
        without_flash,
        lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
    ],
)
def test_keys_cover_the_modes_of_torch(context: Callable[[], Any]) -> None:
    gm, inputs = frame_of(scaled, X)
    plain = key_of(gm, inputs, {})
    with context():
        assert key_of(gm, inputs, {}) != plain
    assert key_of(gm, inputs, {}) == plain


def test_keys_cover_passes_and_their_options() -> None:
    lists = [presets.default(), presets.default(bucket_bytes=1 << 10), presets.default()[:-1]]
    assert len({key(scaled, X, passes=passes) for passes in lists}) == len(lists)


@torch.library.custom_op("zgraph_tests::keyless", mutates_args=())
def operator_of_a_user(x: Tensor) -> Tensor:
    return x * 2


@operator_of_a_user.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.compiler.allow_in_graph
def function_of_a_user(x: Tensor) -> Tensor:
    return x * 2


@torch.compiler.allow_in_graph
@functools.wraps(F.silu)
def function_with_a_name_of_torch(x: Tensor) -> Tensor:
    return x * 2


def policy(*_: Any) -> Any:
    return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def context() -> Any:
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)


def selecting(x: Tensor) -> Tensor:
    return checkpoint(inner, x, use_reentrant=False, context_fn=context)


@pytest.mark.parametrize(
    ("function", "x", "about"),
    [
        (lambda x: operator_of_a_user(x), X, "keyless"),
        (lambda x: function_of_a_user(x), X, "function_of_a_user"),
        (lambda x: function_with_a_name_of_torch(x), X, "torch.nn.functional.silu"),
        (selecting, X.clone().requires_grad_(), "context_fn"),
    ],
)
def test_frames_that_depend_on_code_of_the_user_have_no_key(function: Any, x: Tensor, about: str) -> None:
    with pytest.raises(NotKeyed, match=about):
        key(function, x)


def test_frames_that_read_numbers_have_no_key() -> None:
    gm, inputs = frame_of(lambda x: x.relu(), X)
    (node,) = gm.graph.find_nodes(op="call_method", target="relu")
    node.target = "item"
    with pytest.raises(NotKeyed, match="number"):
        key_of(gm, inputs, {})


def test_methods_of_the_user_have_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, inputs = frame_of(lambda x: x.relu(), X)
    (node,) = gm.graph.find_nodes(op="call_method", target="relu")
    assert key_of(gm, inputs, {})
    monkeypatch.setattr(Tensor, "relu", lambda x: x * 2)
    with pytest.raises(NotKeyed, match="the method relu"):
        key_of(gm, inputs, {})
    node.target = "no_method_of_torch"
    with pytest.raises(NotKeyed, match="no_method_of_torch"):
        key_of(gm, inputs, {})


def test_operators_of_torch_that_others_implement_have_no_key() -> None:
    gm, inputs = frame_of(scaled, X)
    plain = key_of(gm, inputs, {})
    library = torch.library.Library("aten", "IMPL")
    library.impl("hardswish", lambda x: x * 2, "AutogradCPU")
    with pytest.raises(NotKeyed, match="hardswish"):
        key_of(gm, inputs, {})
    library._destroy()
    kernels = torch.ops.aten.hardswish.default.py_kernels
    torch.ops.aten.hardswish.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(lambda x: x * 2)
    try:
        with pytest.raises(NotKeyed, match="hardswish"):
            key_of(gm, inputs, {})
    finally:
        del kernels[torch._C.DispatchKey.CompositeImplicitAutograd]
    assert key_of(gm, inputs, {}) == plain


def test_decompositions_of_the_user_have_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, inputs = frame_of(scaled, X)
    monkeypatch.setitem(decompositions, torch.ops.aten.hardswish.default, lambda x: x * 2)
    assert key_of(gm, inputs, {"lowering": "fx"})
    with pytest.raises(NotKeyed, match="hardswish"):
        key_of(gm, inputs, {"lowering": "inductor"})


def test_passes_of_torch_have_no_key() -> None:
    gm, inputs = frame_of(scaled, X)
    with (
        torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: None),
        pytest.raises(NotKeyed, match="passes of torch"),
    ):
        key_of(gm, inputs, {})


def test_keys_cover_memory_that_inputs_share() -> None:
    def both(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + y + z

    gm, _ = frame_of(both, X, X * 2, X * 3)
    with fake_mode() as mode:
        one, other = torch.ones(3, 2), torch.ones(3, 2)
        views = [value.view(3, 2) for value in (one, other)]
    del mode
    cases = [[one, other, views[0]], [one, other, views[1]], [one, views[0], other], [one, other, torch_like(one)]]
    assert len({key_of(gm, inputs, {}) for inputs in cases}) == len(cases)


def torch_like(value: Tensor) -> Tensor:
    return torch.empty_like(value)


def test_symbolic_sizes_have_no_key() -> None:
    x = torch.ones(6, 2)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(NotKeyed, match="symbolic"):
        key(scaled, x)


def test_nodes_are_in_the_key_with_their_arguments() -> None:
    gm, inputs = frame_of(lambda x: F.gelu(x, approximate="tanh"), X)
    plain = key_of(gm, inputs, {})
    (node,) = nodes.call_functions(gm.graph, lambda node: "gelu" in str(node.target))
    node.kwargs = {"approximate": "none"}
    assert key_of(gm, inputs, {}) != plain
