"""The judge of the numerics tests: the replicated model, its gradients averaged over the ranks in rank order.

Every rank computes all ranks' gradients itself, on a plain copy of the model, without zgraph and without communication.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zgraph
from tests.support.compiled import with_fx
from tests.support.whole_tensors import whole

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
        micro_batches: forwards and backwards per step, all but the last under no_sync.
        replicas: of each shard (hybrid sharding); divides the world.
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
    micro_batches: int = 1
    replicas: int = 1
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

    def __init__(self, case: Case, model: nn.Module, zero_stage: int) -> None:
        self.case = case
        self.zero_stage = zero_stage
        self.model = model
        self.dtype: torch.dtype | None = case.options.get("param_dtype")
        self.wire: torch.dtype | None = case.options.get("reduce_dtype")
        self.mean_dtype: torch.dtype | None = case.options.get("mean_dtype")
        reduction = case.options.get("reduction", "mean")
        self.divisor = {"mean": dist.get_world_size(), "sum": 1}.get(reduction, reduction)

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

    def step(self, step: int) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        """This rank's output of each micro-batch, and the reduced gradients."""
        outputs: list[Tensor] = []
        waiting: list[dict[str, Tensor | None]] = [{} for _ in range(dist.get_world_size())]
        total: dict[str, Tensor | None] = {}
        for micro in range(self.case.micro_batches):
            output, grads = self.micro_step(step * self.case.micro_batches + micro)
            outputs.append(output)
            last = micro == self.case.micro_batches - 1
            for name in grads[0]:
                mine = [own[name] for own in grads]
                if self.waits(name) and self.case.micro_batches > 1:
                    for sums, grad in zip(waiting, mine, strict=True):
                        sums[name] = added(sums.get(name), None if grad is None else grad.float())
                    mine = [sums[name] for sums in waiting]
                    if not last:
                        continue
                total[name] = added(total.get(name), self.reduce(name, mine))
        for name, grad in total.items():
            if grad is None and name.startswith(self.case.zeros or ("\0",)):
                total[name] = torch.zeros_like(self.model.get_parameter(name))
        return outputs, total

    def waits(self, name: str) -> bool:
        """Whether a gradient is summed over the micro-batches before the ranks; 0-d parameters are replicated."""
        return self.zero_stage == 1 or self.is_replicated(name)

    def is_replicated(self, name: str) -> bool:
        return self.zero_stage == 0 or self.model.get_parameter(name).ndim == 0

    def micro_step(self, index: int) -> tuple[Tensor, list[dict[str, Tensor | None]]]:
        """This rank's output, and every rank's own gradients."""
        mine: Tensor | None = None
        found: list[dict[str, Tensor | None]] = []
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        after: dict[str, Tensor] = {}
        for rank, (inputs, target) in enumerate(batches(self.case, index)):
            torch.manual_seed(77 + index)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(before[name])  # every rank's forward starts from the same buffers
            output, grads = self.forward_backward(inputs, target)
            found.append(grads)
            if rank == dist.get_rank():
                mine = output
                after = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for name, buffer in self.model.named_buffers():
            buffer.copy_(after[name])
        assert mine is not None
        return mine, found

    def reduce(self, name: str, grads: list[Tensor | None]) -> Tensor | None:
        """Sum in rank order within each replica, then over the replicas, divide once, and round what is gathered."""
        world = len(grads)
        inner = world // self.case.replicas
        total: Tensor | None = None
        for first in range(0, world, inner):
            partial: Tensor | None = None
            for grad in grads[first : first + inner]:
                travels = None if grad is None else self.on_the_wire(grad) if inner > 1 else grad
                partial = added(partial, None if travels is None else travels.float())
            if partial is not None and self.case.replicas > 1:
                partial = self.on_the_wire(partial).float()
            total = added(total, partial)
        if total is None:
            return None
        mean = total / self.divisor if self.divisor > 1 else total
        if self.case.replicas > 1 or (self.is_replicated(name) and inner > 1):
            gradient = next(grad.dtype for grad in grads if grad is not None)
            mean = mean.to(self.mean_dtype or self.wire or gradient)
        return mean.to(self.model.get_parameter(name).dtype)

    def on_the_wire(self, grad: Tensor) -> Tensor:
        narrows = self.wire is not None and self.wire.itemsize <= grad.dtype.itemsize
        return grad.to(self.wire) if narrows else grad


def added(earlier: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if earlier is None or grad is None:
        return grad if earlier is None else earlier
    return earlier + grad


def compare(case: Case, zero_stage: int, mode: str) -> int:
    """Train `case` sharded and replicated side by side; everything must be bitwise equal.

    Args:
        mode: "eager", "fx", or "part": only the submodules of the first level are compiled.

    Returns:
        How many gradients were compared.
    """
    torch.manual_seed(5)
    model = case.build()
    reference = Replicated(case, copy.deepcopy(model), zero_stage)
    if case.split is not None:
        model = case.split(model, zero_stage)
    else:
        model = zgraph.shard(model, hybrid_mesh(case.replicas), zero_stage=zero_stage, **case.options)
    called: Callable[..., Tensor] = model
    if mode == "fx":
        called = with_fx(model, passes=verified())
    elif mode == "part":
        for part in model.children():
            part.compile(backend="zgraph", options={"lowering": "fx", "passes": verified()})
    # Not the fused AdamW: it computes the last elements of a vector in another instruction order than the others, so a
    # shard would differ from the whole in its last bits.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    expected_optimizer = torch.optim.AdamW(reference.model.parameters(), lr=1e-2, foreach=False)
    compared = 0
    for step in range(case.steps):
        expected_outputs, expected = reference.step(step)
        for micro, expected_output in enumerate(expected_outputs):
            index = step * case.micro_batches + micro
            inputs, target = batches(case, index)[dist.get_rank()]
            torch.manual_seed(77 + index)
            waits = micro < case.micro_batches - 1
            with zgraph.no_sync(model) if waits else contextlib.nullcontext():
                output = case.call(called, inputs)
            assert_equal(f"output {micro} of step {step}", output.detach(), expected_output)
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


def hybrid_mesh(replicas: int) -> DeviceMesh | None:
    """[replicas, world / replicas] ranks; None, the default mesh, for a single replica."""
    if replicas == 1:
        return None
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


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


def verified() -> zgraph.PassList:
    """The default passes, verified on rank 0 of two by replaying whole graphs."""
    return zgraph.PassList(
        zgraph.passes.presets.default(), replay_all=dist.get_world_size() == 2 and dist.get_rank() == 0
    )


def assert_equal(what: str, found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected, f"{what}: found {found}, expected {expected}"
        return
    assert found.dtype == expected.dtype, f"{what}: found {found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: found {list(found.shape)}, expected {list(expected.shape)}"
    if not torch.equal(found, expected):
        off = (found.float() - expected.float()).abs().max().item()
        raise AssertionError(f"{what}: differs by up to {off:.3g} from the replicated model")
