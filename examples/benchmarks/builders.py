"""How each way to train is built: the peers as their manuals have it, zgraph, and the arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    from prediction import Prediction

    from zgraph import GraphPass, Hardware

POWERSGD_RANKS = (1, 4)
POWERSGD_MIN_COMPRESSION = 2
# All gradients in one bucket: with several in flight torch's hook fails on gloo ("Received data size doesn't match"),
# for it starts its second exchange when the first has come, which is at other times on other ranks.
POWERSGD_BUCKET_MIB = 4096
Lowering = Literal["fx", "inductor"]
# Error feedback and warm start need two plain steps first; the benchmark's own warm-up is longer.
POWERSGD_START_STEP = 2


class Optimizer(Protocol):
    """What a training step does with an optimizer."""

    def step(self) -> object: ...

    def zero_grad(self) -> None: ...


@dataclass(frozen=True)
class Trainer:
    """What one strategy holds between steps.

    Attributes:
        predictions: what zgraph expects of each graph that it plans by costs; filled when the first step compiles.
    """

    loss: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    backward: Callable[[Tensor], object] = Tensor.backward
    predictions: list[Prediction] = field(default_factory=list["Prediction"])


@dataclass(frozen=True)
class Setting:
    """What every strategy is built from.

    Attributes:
        lowering: "inductor": every row is compiled by Inductor, the peers as their manuals say. "fx": none is, and
            graphs run node by node.
        hardware: zgraph's measure of this machine and its links.
    """

    config: ModelConfig
    mesh: DeviceMesh
    nodes: int
    lowering: Lowering = "fx"
    hardware: Hardware | None = None

    def new_model(self) -> LanguageModel:
        torch.manual_seed(SEED)
        return LanguageModel(self.config)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """By plain torch.compile, where rows are compiled."""
        return torch.compile(function) if self.lowering == "inductor" else function

    def compiled_by_zgraph(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, backend="zgraph", options={"lowering": self.lowering, **options})

    def compile_blocks(self, model: LanguageModel) -> None:
        """Compile block by block, as FSDP2 asks for: its hooks run between the blocks."""
        backend = "inductor" if self.lowering == "inductor" else "aot_eager"
        for index, block in enumerate(model.blocks):
            model.blocks[index] = cast(nn.Module, torch.compile(block, backend=backend, fullgraph=True))


def build_alone(dtype: torch.dtype, *, compiled: bool = False) -> Callable[[Setting], Trainer]:
    """The whole model on one rank: the arithmetic of a step and no communication.

    Parameters stay fp32 and are cast for use, as under mixed-precision sharding.
    """

    def build(setting: Setting) -> Trainer:
        model = setting.new_model()

        def loss(tokens: Tensor) -> Tensor:
            if dtype == torch.float32:
                return model(tokens)
            parameters = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
            return cast(Tensor, functional_call(model, parameters, (tokens,)))

        run = setting.compiled_by_zgraph(loss) if compiled else setting.compiled(loss)
        return Trainer(cast(Callable[[Tensor], Tensor], run), _adamw(model))

    return build


def build_alone_with_compiled_blocks(setting: Setting) -> Trainer:
    model = setting.new_model()
    setting.compile_blocks(model)
    return Trainer(model, _adamw(model))


def build_ddp(
    register_hook: Callable[[DistributedDataParallel], None] | None, *, bucket_mib: float | None = None
) -> Callable[[Setting], Trainer]:
    """DDP, with a communication hook where one is named; `bucket_mib=None`: buckets of DDP's own size."""

    def build(setting: Setting) -> Trainer:
        model = DistributedDataParallel(
            setting.new_model(),
            process_group=setting.mesh.get_group(),
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mib,
        )
        if register_hook is not None:
            register_hook(model)
        return Trainer(setting.compiled(model), _adamw(model))

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
        start_powerSGD_iter=POWERSGD_START_STEP,
        min_compression_rate=POWERSGD_MIN_COMPRESSION,
    )
    model.register_comm_hook(state, powerSGD_hook)


def build_fsdp2(param_dtype: torch.dtype, *, compiled: bool = False) -> Callable[[Setting], Trainer]:
    """Each block and the rest of the model are one unit, gathered again for backward, gradients reduced in fp32."""

    def build(setting: Setting) -> Trainer:
        model = setting.new_model()
        if compiled or setting.lowering == "inductor":
            setting.compile_blocks(model)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=setting.mesh, mp_policy=policy)
        # By default the root is kept from forward to backward; gathered again, it sends what stage 3 sends.
        fully_shard(model, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=True)
        return Trainer(model, _adamw(model))

    return build


def build_deepspeed(zero_stage: int) -> Callable[[Setting], Trainer]:
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
        engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)
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


def build_zgraph(
    zero_stage: int,
    param_dtype: torch.dtype,
    schedule: Callable[[], list[GraphPass]] | None,
    *,
    predicts: bool = False,
    reduce_dtype: torch.dtype | None = None,
    whole_step: bool = False,
) -> Callable[[Setting], Trainer]:
    """Sharded by zgraph and compiled with the passes of `schedule`, for this machine; None: not compiled.

    With `whole_step` the optimizer is part of the graph, and nothing is left to do after its call.
    """

    def build(setting: Setting) -> Trainer:
        import zgraph

        model = zgraph.shard(
            setting.new_model(),
            setting.mesh,
            zero_stage=zero_stage,
            param_dtype=None if param_dtype == torch.float32 else param_dtype,
            reduce_dtype=reduce_dtype,
        )
        optimizer = zgraph.step_on_shards(_adamw(model))
        if schedule is None:
            return Trainer(model, optimizer)
        from prediction import Predict

        assert setting.hardware is not None
        predictions: list[Prediction] = []
        passes = schedule()
        if predicts:
            passes.append(Predict(into=predictions))
        target = zgraph.Target(hardware=setting.hardware, time_kernels=True)
        pipeline = zgraph.PassList(passes, target=target)
        if whole_step:
            step = _whole_step(model, _adamw(model), {"lowering": setting.lowering, "passes": pipeline})
            nothing_left = torch.optim.SGD([torch.zeros(1)])
            return Trainer(step, nothing_left, backward=lambda loss: None)
        run = setting.compiled_by_zgraph(model, passes=pipeline)
        return Trainer(run, optimizer, predictions=predictions)

    return build


def _whole_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    import zgraph

    @zgraph.training_step(model, optimizer, options=options)
    def step(tokens: Tensor, /) -> Tensor:
        loss = cast(Tensor, model(tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def planned() -> list[GraphPass]:
    """What a user gets who names the hardware."""
    from zgraph.passes import presets

    return presets.planned()


def all_reduced() -> list[GraphPass]:
    """Planned, and gloo reduces in an order of its own, as it does for DDP: equal up to rounding."""
    from zgraph.passes import LowerReductions

    return [LowerReductions(algorithm="all_reduce") if isinstance(one, LowerReductions) else one for one in planned()]


def compressed() -> list[GraphPass]:
    """Planned, and gradients travel as codes of 4 bits."""
    from zgraph.passes import LoCo, presets

    return presets.planned(compression=LoCo())


def low_rank(rank: int) -> list[GraphPass]:
    """Planned, and gradients travel as factors."""
    from zgraph.passes import LowRank, presets

    return presets.planned(compression=LowRank(rank=rank))


def compressed_with_means(bits: int) -> list[GraphPass]:
    """The same, and the means of replicated parameters come back in so many bits, with errors of their own."""
    from zgraph.passes import CompressGradients, LoCo

    means = CompressGradients(mean_codec=LoCo(bits=bits))
    return [means if isinstance(entry, CompressGradients) else entry for entry in compressed()]


def by_rules() -> list[GraphPass]:
    """What a user gets who does not; the costs are for the prediction alone."""
    from zgraph.passes import presets

    return presets.default()


def simple_fsdp() -> list[GraphPass]:
    """One gather for each parameter just before its use, one reduce_scatter for each gradient, as in SimpleFSDP."""
    return _each_apart("reduce_scatter")


def simple_fsdp_with_overlap() -> list[GraphPass]:
    """The same, bucketed and scheduled by PyTorch, which is told what things cost here."""
    from torch_overlap import TorchOverlap

    return [*_each_apart("reduce_scatter"), TorchOverlap()]


def torch_overlap() -> list[GraphPass]:
    """The collectives that zgraph takes on gloo, bucketed and scheduled by PyTorch."""
    from torch_overlap import TorchOverlap

    return [*_each_apart("all_to_all"), TorchOverlap()]


def _each_apart(algorithm: Literal["all_to_all", "reduce_scatter"]) -> list[GraphPass]:
    from zgraph.passes import ChooseLifetimes, DedupeGathers, LowerGathers, LowerReductions

    return [DedupeGathers(), ChooseLifetimes(), LowerGathers(), LowerReductions(algorithm=algorithm)]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
