"""How each way to train is built: the peers as their manuals have it, zgraph, and the arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from workload import SEED, LanguageModel, ModelConfig

if TYPE_CHECKING:  # the other strategies run where zgraph is not installed
    from zgraph import GraphPass, Hardware

# All gradients in one bucket: with several in flight torch's PowerSGD hook fails on gloo ("Received data size doesn't
# match"), for it starts its second exchange when the first has come, which is at other times on other ranks.
ONE_BUCKET_MIB = 4096


class Optimizer(Protocol):
    """What a training step does with an optimizer."""

    def step(self) -> object: ...

    def zero_grad(self) -> None: ...


@dataclass(frozen=True)
class Trainer:
    """What one strategy holds between steps.

    Attributes:
        predicted: the sharded model, where zgraph has planned its graphs by costs.
    """

    loss: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    backward: Callable[[Tensor], object] = Tensor.backward
    predicted: nn.Module | None = None


@dataclass(frozen=True)
class Setting:
    """What every strategy is built from.

    Attributes:
        mesh: mesh of the data-parallel ranks.
        lowering: "inductor": every row is compiled by Inductor, the peers as their manuals say. "fx": none is, and
            graphs run node by node.
        hardware: zgraph's measure of this machine and its links; None: nothing is planned by costs.
        make_model: the model, with weights as the generator has them.
    """

    config: ModelConfig
    mesh: DeviceMesh
    lowering: Literal["fx", "inductor"] = "fx"
    hardware: Hardware | None = None
    make_model: Callable[[ModelConfig], LanguageModel] = LanguageModel

    def new_model(self) -> LanguageModel:
        torch.manual_seed(SEED)
        return self.make_model(self.config)


Build = Callable[[Setting], Trainer]
Schedule = Callable[[], "list[GraphPass]"]


# --- what all of them are made of, on CPUs and on GPUs ----------------------------------------------------------------


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    given: dict[str, Any] = {"lr": 1e-3, "fused": True, **options}
    return torch.optim.AdamW(model.parameters(), **given)


def cast_to(dtype: torch.dtype | None, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model as it computes with parameters and inputs of that dtype, as under mixed-precision sharding."""
    if dtype is None:
        return model

    def called(x: Tensor) -> Tensor:
        parameters = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        return cast(Tensor, functional_call(model, parameters, (x.to(dtype) if x.is_floating_point() else x,)))

    return called


def plain_step(called: Callable[[Tensor], Tensor], optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    """Forward, backward and update; returns the loss."""

    def step(x: Tensor) -> Tensor:
        loss = called(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def whole_step(model: nn.Module, optimizer: Optimizer, options: dict[str, Any]) -> Any:
    """The same as one graph, by zgraph; its attribute `function` is the plain step."""
    import zgraph

    given: Any = optimizer
    return zgraph.training_step(model, given, options=options)(plain_step(cast(Any, model), optimizer))


def shard_fully(model: nn.Module, blocks: Iterable[nn.Module], compiler: str | None, **options: Any) -> None:
    """FSDP2 as in its manual: each block is one unit, compiled separately; the rest of the model is another unit."""
    for block in blocks:
        if compiler is not None:
            block.compile(backend=compiler, fullgraph=True)
        fully_shard(block, **options)
    fully_shard(model, **options)


# --- the peers --------------------------------------------------------------------------------------------------------


def build_ddp(register: Callable[[Any], None] | None = None, *, one_bucket: bool = False) -> Build:
    """DDP, with a communication hook where one is named; in buckets of its own size, or in one."""

    def build(setting: Setting) -> Trainer:
        model = DistributedDataParallel(
            setting.new_model(),
            process_group=setting.mesh.get_group(),
            gradient_as_bucket_view=True,
            bucket_cap_mb=ONE_BUCKET_MIB if one_bucket else None,
        )
        if register is not None:
            register(model)
        called: Any = torch.compile(model) if setting.lowering == "inductor" else model
        return Trainer(called, adamw(model))

    return build


def hook_fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)


def hook_bf16(model: DistributedDataParallel) -> None:
    # By its own name DDP refuses it without NCCL; gloo reduces bf16 all the same.
    model.register_comm_hook(model.process_group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))


def hook_powersgd(rank: int, model: DistributedDataParallel) -> None:
    state = PowerSGDState(
        model.process_group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=2,  # error feedback and warm start need two plain steps first; the warm-up is longer
    )
    model.register_comm_hook(state, powerSGD_hook)


def build_fsdp2(
    param_dtype: torch.dtype | None = None, *, reduce_dtype: torch.dtype = torch.float32, gathers_again: bool = True
) -> Build:
    """Blocks and the rest are gathered again for backward, or where they are not, from then on kept as at stage 2."""

    def build(setting: Setting) -> Trainer:
        model = setting.new_model()
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        compiler = "inductor" if setting.lowering == "inductor" else None
        # By default the root is kept from forward to backward; gathered again, it sends what stage 3 sends.
        options: dict[str, Any] = {"mesh": setting.mesh, "mp_policy": policy, "reshard_after_forward": gathers_again}
        shard_fully(model, model.blocks, compiler, **options)
        return Trainer(model, adamw(model))

    return build


def build_deepspeed(zero_stage: int) -> Build:
    """ZeRO with the overlap that DeepSpeed offers, and buckets of the size that zgraph's rules use on such a link."""

    def build(setting: Setting) -> Trainer:
        import deepspeed  # pyright: ignore[reportMissingImports]  # optional

        model = setting.new_model()
        config = {
            "train_micro_batch_size_per_gpu": setting.config.batch,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # as the others; the default became 1.0 with DeepSpeed#8068
            "zero_optimization": {
                "stage": zero_stage,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": 500_000,
                "allgather_bucket_size": 500_000,
                "stage3_prefetch_bucket_size": 500_000,
                "stage3_param_persistence_threshold": 1_000,
                "stage3_max_live_parameters": 10_000_000,
            },
        }
        engine: Any
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
        # Stage 3 runs node by node: its hooks, compiled, make Dynamo recompile past any limit (0.19.8).
        if setting.lowering == "inductor" and zero_stage < 3:
            engine.compile()
        return Trainer(engine, _EngineOptimizer(engine), backward=engine.backward)

    return build


@dataclass(frozen=True)
class _EngineOptimizer:
    """DeepSpeed's engine steps and clears in one call."""

    engine: Any

    def step(self) -> object:
        return self.engine.step()

    def zero_grad(self) -> None:
        pass


# --- zgraph -----------------------------------------------------------------------------------------------------------


def build_zgraph(schedule: Schedule, *, whole: bool = False, predicts: bool = True, **of_shard: Any) -> Build:
    """Sharded by zgraph and compiled with the passes of `schedule`, for this machine where it was measured.

    With `whole` the optimizer is part of the graph, and nothing is left to do after its call.
    """

    def build(setting: Setting) -> Trainer:
        import zgraph

        model = zgraph.shard(setting.new_model(), setting.mesh, **of_shard)
        measured = setting.hardware
        target = None if measured is None else zgraph.Target(hardware=measured, time_kernels=True)
        options: dict[str, Any] = {"lowering": setting.lowering, "passes": zgraph.PassList(schedule(), target=target)}
        if whole:
            nothing_left = torch.optim.SGD([torch.zeros(1)])
            return Trainer(whole_step(model, adamw(model), options), nothing_left, backward=lambda loss: None)
        run: Any = torch.compile(model, backend="zgraph", options=options)
        return Trainer(
            run, zgraph.step_on_shards(adamw(model)), predicted=model if predicts and target is not None else None
        )

    return build


def planned(**options: Any) -> list[GraphPass]:
    """The default with a hardware description, which plans by costs."""
    from zgraph.passes import presets

    return presets.planned(**options)


def by_rules(**options: Any) -> list[GraphPass]:
    """The default without a hardware description; costs serve only the prediction."""
    from zgraph.passes import presets

    return presets.default(**options)


def all_reduced() -> list[GraphPass]:
    """Planned, and gloo reduces in an order of its own, as it does for DDP: equal up to rounding."""
    from zgraph.passes import LowerReductions

    return [replace(one, algorithm="all_reduce") if isinstance(one, LowerReductions) else one for one in planned()]


def low_rank(rank: int) -> list[GraphPass]:
    """Planned, and gradients travel as factors."""
    from zgraph.passes import LowRank

    return planned(compression=LowRank(rank=rank))


def sign_momentum() -> list[GraphPass]:
    """Planned, and signs of momenta travel after one step; the time of a step does not depend on the warm-up."""
    from zgraph.passes import SignMomentum

    return planned(compression=SignMomentum(warmup=1))


def loco(means_bits: int | None = None, *, preset: Callable[..., list[GraphPass]] = planned) -> list[GraphPass]:
    """Send gradients as 4-bit codes, and means of replicated gradients in bf16 or in the given number of bits."""
    from zgraph.passes import CompressGradients, LoCo

    passes = preset(compression=LoCo())
    if means_bits is None:
        return passes
    means = CompressGradients(mean_codec=LoCo(bits=means_bits))
    return [means if isinstance(one, CompressGradients) else one for one in passes]


def scheduled_by_torch(algorithm: Any) -> list[GraphPass]:
    """A gather for each parameter, a reduction for each gradient, bucketed and scheduled by PyTorch.

    With "reduce_scatter" the graph is SimpleFSDP's; with "all_to_all" collectives are those that zgraph takes on gloo.
    """
    from torch_overlap import TorchOverlap

    from zgraph.passes import ChooseLifetimes, DedupeGathers, LowerGathers, LowerReductions

    return [
        *(DedupeGathers(), ChooseLifetimes(), LowerGathers(), LowerReductions(algorithm=algorithm)),
        TorchOverlap(),
    ]
