"""zgraph in Hugging Face Accelerate: an Accelerator whose `prepare` shards and compiles.

    from zgraph.integrations.accelerate import Accelerator, ZgraphPlugin

    accelerator = Accelerator(zgraph_plugin=ZgraphPlugin(zero_stage=3))

Everything else in the script stays as it is. A process that torchrun has not started shards nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend
from torch import Tensor, nn, optim

from zgraph.integrations.accelerate_checkpoints import CheckpointsOfShards
from zgraph.integrations.refusals import (
    refuse_launch,
    refuse_other_ways,
    refuse_uneven,
    refuse_unshardable,
    warn_of_bf16,
)
from zgraph.integrations.sharding import Sharding, agreeing, is_sharded, plain, unwrapped
from zgraph.optimizers.gradients import clip_grad_norm_
from zgraph.optimizers.loss_scale import set_loss_scale
from zgraph.sharding.no_sync import no_sync
from zgraph.torch_compat.dynamo import is_compiled_in_place

LOGGER = get_logger(__name__)


class ZgraphPlugin(Sharding):
    """How an `Accelerator` shards and compiles: arguments of `zgraph.shard` but the module, `options` and `compile`."""


class Accelerator(CheckpointsOfShards):
    """Accelerate's Accelerator, which shards models instead of wrapping them in DistributedDataParallel.

    Models are sharded and compiled in place: class and keys stay. `save_state` writes models and their optimizers as
    zgraph's checkpoints inside Accelerate's folder, and `load_state` reads them on any number of ranks.
    `get_state_dict`, `save_model` and `save_pretrained` give whole weights on the main process.

    With `mixed_precision="bf16"`, parameters are also gathered in bf16 (`param_dtype`), as in Accelerate's FSDP2;
    `ZgraphPlugin(param_dtype=torch.float32)` keeps the numbers of DistributedDataParallel.

    Args:
        args, kwargs: as for `accelerate.Accelerator`.
        zgraph_plugin: how to shard and compile; None: by the defaults of `zgraph.shard`.

    Raises:
        ValueError: an argument, or `accelerate config`, asks for another way to shard or compile, or Accelerate does
            not see the other ranks.
    """

    def __init__(self, *args: Any, zgraph_plugin: ZgraphPlugin | None = None, **kwargs: Any) -> None:
        refuse_other_ways(kwargs)
        super().__init__(*args, **kwargs)
        compiler = getattr(self.state.dynamo_plugin, "backend", DynamoBackend.NO)
        if compiler != DynamoBackend.NO:
            raise ValueError(
                f"zgraph: Accelerator would compile with {compiler}, but zgraph compiles the model itself; leave "
                "dynamo_backend and torch_compile out, or write ZgraphPlugin(options={...})."
            )
        refuse_launch(self.distributed_type)
        self.zgraph_plugin = zgraph_plugin or ZgraphPlugin()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's, but every model is sharded, and the optimizers among the arguments step its shards.

        Raises:
            ValueError: a model cannot be sharded, is compiled already, or an optimizer has state already.
        """
        optimizers = [unwrapped(one) for one in args if isinstance(one, optim.Optimizer)]
        for model in args:
            if isinstance(model, nn.Module) and self.distributed_type != "NO" and not is_sharded(model):
                self._shard(model, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def _shard(self, model: nn.Module, optimizers: list[optim.Optimizer]) -> None:
        refuse_unshardable(model)
        warn_of_bf16(model)
        defaults: dict[str, Any] = {}
        if self.mixed_precision == "bf16":
            defaults["param_dtype"] = torch.bfloat16
            dtype = self.zgraph_plugin.shard_options.get("param_dtype", torch.bfloat16)
            LOGGER.info(f"zgraph: parameters of {type(model).__name__} are gathered as {dtype}.")
        self.zgraph_plugin.apply(model.to(self.device), optimizers, **defaults)
        scaler: Any = self.scaler  # None unless mixed_precision="fp16"
        if scaler is not None:
            self.scaler = agreeing(scaler, self.device)
            set_loss_scale(model, self.scaler)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not is_sharded(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        # In evaluation mode it adds autocast, unless it has before, and no DistributedDataParallel.
        model = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if not is_compiled_in_place(model):
            self.zgraph_plugin.compile_in_place(model)
        return model

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's.

        Raises:
            ValueError: `even_batches=False` would give some ranks a batch less.
        """
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        refuse_uneven(prepared)
        return prepared

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        if any(is_sharded(one) for one in joinables):
            raise ValueError(
                "zgraph: join_uneven_inputs is not available, since all ranks must call a sharded model alike; leave "
                "it out, and even_batches=False as well: Accelerate then gives all ranks as many batches."
            )
        return super().join_uneven_inputs(joinables, even_batches)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """`zgraph.no_sync` of a sharded model."""
        with no_sync(model) if is_sharded(model) else super().no_sync(model):
            yield

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> Any:
        raise ValueError("zgraph: trigger_sync_in_backward is not available; run the last forward outside of no_sync.")

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients by their norm over all ranks; the norm is returned as a plain tensor."""
        self.unscale_gradients()
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return plain(clip_grad_norm_(given, max_norm, norm_type))
