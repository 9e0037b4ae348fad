"""zgraph in Lightning: a strategy that shards and compiles a LightningModule.

    from zgraph.integrations.lightning import ZgraphStrategy

    trainer = L.Trainer(strategy=ZgraphStrategy(zero_stage=3), accelerator="gpu", devices=8)

Everything else in the script stays as it is. Importing this module also registers `strategy="zgraph"`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from zgraph.integrations.lightning_checkpoints import CheckpointsOfShards
from zgraph.integrations.lightning_modules import (
    called_parts,
    cast_inputs_of_parts,
    refuse_averaging,
    refuse_compiled,
    refuse_other_options,
)
from zgraph.integrations.sharding import Sharding, agreeing, step_on_shards_if_possible
from zgraph.optimizers.loss_scale import set_loss_scale
from zgraph.sharding.no_sync import no_sync
from zgraph.sharding.scope import state_of
from zgraph.sharding.unit import gathering
from zgraph.torch_compat.dynamo import is_compiled_in_place, is_compiled_wrapper


class ZgraphStrategy(Sharding, CheckpointsOfShards):
    """Lightning's strategy that shards a LightningModule by `zgraph.shard`, and compiles its children.

    Each step runs as the forward of the sharded LightningModule, in which the module's own parameters read whole. With
    manual optimization `training_step` does not, since it has backwards inside: read such parameters in `forward` then,
    or by `full_tensor()`. With a `param_dtype`, inputs of the children are cast, but not the batch.

    A checkpoint is a file like DDP's, which runs without sharding load, too. A model stays as it was sharded and
    compiled first, also under another strategy.

    Args:
        options, compile: as for `Sharding`; the children are compiled one by one, in place.
        save_distributed_checkpoint: whether a checkpoint is a folder instead, in which each rank writes its shards, and
            which includes random generators and error feedback.
        process_group_backend, timeout: as for ModelParallelStrategy.
        shard: arguments of `zgraph.shard`, without the module.

    Raises:
        TypeError: `zgraph.shard` has no such argument.
        ValueError: children of a model with a context axis would be compiled one by one.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, Any] | None = None,
        compile: bool = True,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        **shard: Any,
    ) -> None:
        Sharding.__init__(self, options=options, compile=compile, **shard)
        if compile and self.shard_options.get("context") is not None:
            raise ValueError(
                "zgraph: ZgraphStrategy(context=...) compiles the children of a LightningModule one by one, and a "
                "model with a context axis is compiled as a whole or not at all; write "
                "ZgraphStrategy(..., compile=False)."
            )
        CheckpointsOfShards.__init__(
            self,
            saves_folders=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        # lightning 2.6: "auto" would be the number of machines.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """As ModelParallelStrategy's, but the model is sharded here, so that it needs no `configure_model`.

        Raises:
            ValueError: the model cannot be sharded, or was sharded with other options; an optimizer has state already;
                or a callback averages weights.
        """
        module = self.module
        refuse_averaging(trainer)
        refuse_compiled(module)
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        if state_of(module) is None:
            self.apply(module, self.optimizers, mesh=self.device_mesh["data_parallel"])
            cast_inputs_of_parts(module)
            for part in called_parts(module):
                if not is_compiled_wrapper(part) and not is_compiled_in_place(part):
                    self.compile_in_place(part)
        else:
            refuse_other_options(module, self.shard_options)
            step_on_shards_if_possible(self.optimizers)
        self.barrier()
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            plugin.scaler = agreeing(plugin.scaler, plugin.device)
            set_loss_scale(module, plugin.scaler)
        self.setup_precision_plugin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            if not self.module.automatic_optimization:
                return self.module.training_step(*args, **kwargs)  # has backwards and steps inside
            return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", *args, **kwargs)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        return gathering(module, getattr(module, name))(*args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """`zgraph.no_sync` of the LightningModule."""
        with no_sync(self.module):
            yield


StrategyRegistry.register("zgraph", ZgraphStrategy, description="Sharded and compiled by zgraph", override=True)
