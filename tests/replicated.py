"""The judge of the numerics tests: the replicated model, its gradients averaged over the ranks in rank order.

Every rank computes all ranks' gradients itself, on a plain copy of the model, without zgraph and without communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zgraph

STEPS = 3


def token_batch(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 23, (2, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def feature_batch(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6, generator=generator), torch.randn(8, generator=generator)


def growing_batch(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Another batch size and another length in every step."""
    tokens = torch.randint(0, 23, (2 + step, 5 + 2 * step), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def growing_features(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4 + 3 * step, 6, generator=generator), torch.randn(4 + 3 * step, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())
    # Elementwise, so that the gradient which enters the model's graph is contiguous: AOTAutograd makes it so in any
    # case, and a sum over an expanded gradient rounds otherwise than one over its contiguous copy.
    return (output.float() - target.unsqueeze(-1)).square().mean()


@dataclass(kw_only=True)
class Case:
    """One comparison: a model, its batches, and how it is sharded and called.

    Attributes:
        build: makes the plain model.
        batch: (step, rank, generator) -> inputs, targets.
        options: for zgraph.shard.
        autocast: dtype to autocast to.
        backwards: how often backward runs on one loss (with retain_graph).
        zeros: parameters by prefix that receive zeros where no rank read them.
        evaluate: compare the output in eval mode under no_grad as well, which is one more graph.
        split: shards the model itself instead of one call of zgraph.shard.
        loss: (output, target) -> the scalar that backward starts from.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]] = feature_batch
    options: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    backwards: int = 1
    zeros: tuple[str, ...] = ()
    evaluate: bool = False
    split: Callable[[nn.Module, int], nn.Module] | None = None
    steps: int = STEPS
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of

    def call(self, model: Callable[..., Tensor], inputs: Tensor, *, cache: bool = True) -> Tensor:
        if self.autocast is None:
            return model(inputs)
        with torch.autocast("cpu", dtype=self.autocast, cache_enabled=cache):
            return model(inputs)


def batches(case: Case, step: int) -> list[tuple[Tensor, Tensor]]:
    return [
        case.batch(step, rank, torch.Generator().manual_seed(1000 * step + rank))
        for rank in range(dist.get_world_size())
    ]


class Replicated:
    """The plain model and what data parallelism defines its gradients to be."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case = case
        self.model = model
        self.dtype: torch.dtype | None = case.options.get("param_dtype")
        self.wire: torch.dtype | None = case.options.get("reduce_dtype")
        self.mean = case.options.get("reduction", "mean") == "mean"

    def forward_backward(self, inputs: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        leaves = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        call: Callable[..., Tensor] = self.model
        if self.dtype is not None:
            cast = {name: p.detach().to(self.dtype) for name, p in self.model.named_parameters()}
            leaves = {name: cast[name].requires_grad_() for name in leaves}
            if inputs.is_floating_point():
                inputs = inputs.to(self.dtype)

            def call(tensor: Tensor) -> Tensor:
                return torch.func.functional_call(self.model, cast, (tensor,))

        # autocast's cache makes eager torch cast a leaf once and sum the gradients of its uses in half precision, which
        # neither a graph nor a gathered parameter does: they cast at each use and sum in fp32.
        output = self.case.call(call, inputs, cache=False)
        loss = self.case.loss(output, target)
        grads: dict[str, Tensor | None] = {}
        for _ in range(self.case.backwards):
            found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
            grads = {
                name: grad if name not in grads else grads[name] + grad
                for name, grad in zip(leaves, found, strict=True)
            }
        return output.detach(), grads

    def step(self, step: int) -> tuple[Tensor, dict[str, Tensor | None]]:
        """This rank's output, and the averaged gradients."""
        mine: Tensor | None = None
        total: dict[str, Tensor | None] = {}
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        after: dict[str, Tensor] = {}
        for rank, (inputs, target) in enumerate(batches(self.case, step)):
            torch.manual_seed(77 + step)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(before[name])  # every rank's forward starts from the same buffers
            output, grads = self.forward_backward(inputs, target)
            if rank == dist.get_rank():
                mine = output
                after = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            for name, grad in grads.items():
                if grad is None:
                    total.setdefault(name, None)
                    continue
                travels = dist.get_world_size() > 1
                if travels and self.wire is not None and self.wire.itemsize <= grad.dtype.itemsize:
                    grad = grad.to(self.wire)
                earlier = total.get(name)
                total[name] = grad.float() if earlier is None else earlier + grad.float()
        for name, buffer in self.model.named_buffers():
            buffer.copy_(after[name])
        world = dist.get_world_size()
        for name, grad in total.items():
            if grad is None and name.startswith(self.case.zeros or ("\0",)):
                total[name] = torch.zeros_like(self.model.get_parameter(name))
            elif grad is not None and self.mean and world > 1:
                total[name] = grad / world
        assert mine is not None
        return mine, total


def compare(case: Case, zero_stage: int, mode: str) -> int:
    """Train `case` sharded and replicated side by side; everything must be bitwise equal.

    Args:
        mode: "eager", "fx", or "part": only the submodules of the first level are compiled.

    Returns:
        How many gradients were compared.
    """
    torch.manual_seed(5)
    model = case.build()
    reference = Replicated(case, copy.deepcopy(model))
    if case.split is not None:
        model = case.split(model, zero_stage)
    else:
        model = zgraph.shard(model, zero_stage=zero_stage, **case.options)
    called: Callable[..., Tensor] = model
    if mode == "fx":
        called = torch.compile(model, backend="zgraph", options={"pipeline": verified()})
    elif mode == "part":
        for part in model.children():
            part.compile(backend="zgraph", options={"pipeline": verified()})
    # Not the fused AdamW: it computes the last elements of a vector in another instruction order than the others, so a
    # shard would differ from the whole in its last bits.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    expected_optimizer = torch.optim.AdamW(reference.model.parameters(), lr=1e-2, foreach=False)
    compared = 0
    for step in range(case.steps):
        inputs, target = batches(case, step)[dist.get_rank()]
        expected_output, expected = reference.step(step)
        torch.manual_seed(77 + step)
        output = case.call(called, inputs)
        assert_equal(f"output of step {step}", output.detach(), expected_output)
        loss = case.loss(output, target)
        for remaining in reversed(range(case.backwards)):
            loss.backward(retain_graph=remaining > 0)
        for name, parameter in model.named_parameters():
            found = None if parameter.grad is None else whole(parameter.grad)
            assert_equal(f"gradient of {name} in step {step}", found, expected.get(name))
            compared += found is not None
        for name, parameter in reference.model.named_parameters():
            parameter.grad = expected.get(name)
        optimizer.step()
        expected_optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert_equal(f"{name} after step {step}", whole(parameter.detach()), reference.model.get_parameter(name))
        for (name, buffer), other in zip(model.named_buffers(), reference.model.buffers(), strict=True):
            assert_equal(f"buffer {name} after step {step}", buffer, other)
    if case.evaluate:
        assert_evaluation_equal(case, called, model, reference)
    return compared


def assert_evaluation_equal(case: Case, called: Callable[..., Tensor], model: nn.Module, reference: Replicated) -> None:
    model.eval()
    reference.model.eval()
    inputs, _ = batches(case, 0)[dist.get_rank()]
    with torch.no_grad():
        expected, _ = _no_grad_output(reference, inputs)
        assert_equal("output in eval under no_grad", case.call(called, inputs), expected)


def _no_grad_output(reference: Replicated, inputs: Tensor) -> tuple[Tensor, None]:
    model: Callable[..., Tensor] = reference.model
    if reference.dtype is not None:
        cast = {name: p.detach().to(reference.dtype) for name, p in reference.model.named_parameters()}
        inputs = inputs.to(reference.dtype) if inputs.is_floating_point() else inputs
        return torch.func.functional_call(reference.model, cast, (inputs,)), None
    return reference.case.call(model, inputs), None


def verified() -> zgraph.Pipeline:
    """The default passes, verified on two ranks by replaying whole graphs."""
    return zgraph.Pipeline(zgraph.passes.presets.default(), replay_all=dist.get_world_size() == 2)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(what: str, found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected, f"{what}: found {found}, expected {expected}"
        return
    assert found.dtype == expected.dtype, f"{what}: found {found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: found {list(found.shape)}, expected {list(expected.shape)}"
    if not torch.equal(found, expected):
        off = (found.float() - expected.float()).abs().max().item()
        raise AssertionError(f"{what}: differs by up to {off:.3g} from the replicated model")
