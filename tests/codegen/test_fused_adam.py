"""Updates of fp32 moments: the C++ kernel writes the bits of torch's fused Adam and AdamW; the rest it leaves to it."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from zgraph.codegen.kernels.cpu import fused_adam
from zgraph.codegen.kernels.cpu.fused_adam import faster, lanes_of_torch
from zgraph.codegen.lower_fx import lower_fx

aten = torch.ops.aten
NUMELS = (1, 7, 8, 15, 16, 17, 63, 1000, 70001, 100_007)  # ends of vectors, of cache lines, of shares of threads
SPECIAL = (math.nan, math.inf, -math.inf, 1e-30, 0.0, 1e30, 1e-42, -0.0)
OPERATORS = {"adamw": aten._fused_adamw_.default, "adam": aten._fused_adam_.default}
OPTIONS: dict[str, Any] = {
    **{"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8},
    **{"amsgrad": False, "maximize": False},
}
OTHERS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "no decay": {"weight_decay": 0.0},
    "small betas": {"beta1": 0.4, "beta2": 0.6, "maximize": True},  # averages are then reckoned from the gradient
    "beta of a half": {"beta1": 0.5, "eps": 0.0},
    "zero": {"beta1": 0.0, "beta2": 0.0},
    "scaled": {"grad_scale": torch.tensor(3.0), "found_inf": torch.tensor(0.0)},
    "lr as a tensor": {"lr": torch.tensor(1e-2)},
}


@pytest.fixture
def two_threads() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    lanes_of_torch()  # calls torch's kernel, once
    yield
    torch.set_num_threads(before)


def lists(numels: tuple[int, ...] = NUMELS, special: bool = True) -> list[list[Tensor]]:
    """Parameters, gradients and both moments, with special values at some places of each."""
    generator = torch.Generator().manual_seed(0)
    made = [[torch.randn(numel, generator=generator) for numel in numels] for _ in range(4)]
    made[3] = [one.abs() for one in made[3]]
    for offset, tensors in enumerate(made if special else ()):
        for one in tensors:
            for place, value in enumerate(SPECIAL if len(one) > 60 else ()):
                one[-1 - place * (offset + 3)] = abs(value) if offset == 3 else value
    return made


def copied(given: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[one.clone() for one in tensors] for tensors in given]


def bits(tensor: Tensor) -> Tensor:
    """Bits, of which those of a NaN are always the same: which of two a sum passes on is left to compilers."""
    return tensor.masked_fill(tensor.isnan(), math.nan).view(torch.int32)


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for name, ours, theirs in zip(("parameters", "grads", "exp_avgs", "exp_avg_sqs"), found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(bits(one), bits(other)), f"{name} of {len(one)}"


class Record(TorchDispatchMode):
    """Notes the operators that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def is_taken(operator: Any, given: list[list[Tensor]], fewest: int = 0, **options: Any) -> bool:
    """Whether the kernel, and not torch's, has taken a call; what it has written is compared with torch's."""
    update, expected = faster(operator, operator, fewest), copied(given)
    assert update is not None
    steps = [torch.tensor(2.0 + number % 2) for number in range(len(given[0]))]
    options = OPTIONS | options
    highest = [torch.ones_like(one) for one in given[0]] if options["amsgrad"] else []
    with torch.no_grad(), Record() as record:
        update(*given, highest, steps, **options)
        operator(*expected, [one.fill_(1) for one in highest], steps, **options)
    assert_same(given, expected)
    return record.seen.count(operator) == 1


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.usefixtures("two_threads")
def test_bits_are_those_of_torch(operator: Any, options: dict[str, Any]) -> None:
    """Over several steps, on values of every kind, with tensors that end within a vector."""
    overload = operator.overloadpacket.tensor_lr if isinstance(options.get("lr"), Tensor) else operator
    given = lists()
    for _ in range(3):
        assert is_taken(overload, given, **options) == (lanes_of_torch() is not None)


def test_on_x86_the_kernel_is_taken() -> None:
    """Built by pip, torch has vectors of 8 elements there; if it had others, or summed otherwise, this would say so."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has neither AVX2 nor AVX512")
    assert lanes_of_torch() == 8


def test_other_vectors_are_noticed() -> None:
    lanes = lanes_of_torch()
    if lanes is None:
        pytest.skip("torch's kernel computes otherwise on this machine")
    for other in {4, 8, 16} - {lanes}:
        assert not fused_adam.agrees(other, decoupled=True, decays=True, near=True, scaled=False)


@pytest.mark.usefixtures("two_threads")
def test_what_it_does_not_take_is_left_to_torch() -> None:
    operator = aten._fused_adamw_.default
    assert not is_taken(operator, lists(), amsgrad=True)
    assert not is_taken(operator, lists(special=False), fewest=10**6)
    strided = [[torch.rand(64, 65).t()] for _ in range(4)]
    expected = copied(strided)
    update, steps = faster(operator, operator, 0), [torch.tensor(1.0)]
    assert update is not None
    update(*strided, [], steps, **OPTIONS)
    operator(*expected, [], steps, **OPTIONS)
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(strided, expected, strict=True))
    halves = [[torch.rand(100).bfloat16()] for _ in range(4)]
    with Record() as record:
        update(*halves, [], steps, **OPTIONS)
    assert record.seen == [operator]
    torch.set_num_threads(1)
    assert not is_taken(operator, lists())
    assert faster(aten._fused_sgd_.default, operator) is None


@pytest.mark.usefixtures("two_threads")
def test_an_inf_leaves_everything_as_it_was() -> None:
    given = lists()
    before = copied(given)
    assert is_taken(aten._fused_adamw_.default, given, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(1.0))
    assert_same(given, before)


@pytest.mark.usefixtures("two_threads")
def test_autograd_sees_that_parameters_were_written() -> None:
    """A backward that needs the old values is refused, as after torch's own."""
    given = lists((1000,), special=False)
    update = faster(aten._fused_adamw_.default, aten._fused_adamw_.default, 0)
    assert update is not None
    weight = given[0][0].requires_grad_()
    loss = (weight * weight).sum()
    with torch.no_grad():
        update(*given, [], [torch.tensor(1.0)], **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("two_threads")
def test_programs_call_it_for_large_updates() -> None:
    """As one line of a program that is lowered node by node; small ones stay torch's."""
    for numel, calls in ((fused_adam.FEWEST // 2, 0), (8, 1)):
        given = lists((numel, numel), special=False)
        steps = [torch.tensor(1.0), torch.tensor(2.0)]
        graph = fx.Graph()
        names = [[f"{kind}{place}" for place in range(2)] for kind in ("parameter", "grad", "avg", "sq", "step")]
        inputs = [[graph.placeholder(name) for name in kind] for kind in names]
        for nodes, tensors in zip(inputs, [*given, steps], strict=True):
            for node, tensor in zip(nodes, tensors, strict=True):
                node.meta["val"] = tensor
        operator = aten._fused_adamw_.default
        graph.call_function(operator, (*inputs[:4], [], inputs[4]), OPTIONS)
        graph.output(())
        expected = copied(given)
        lowered = lower_fx(fx.GraphModule({}, graph))
        with torch.no_grad(), Record() as record:
            lowered([tensor for tensors in [*given, steps] for tensor in tensors])
            operator(*expected, [], steps, **OPTIONS)
        assert_same(given, expected)
        assert record.seen.count(operator) == 1 + calls
