"""A frame: the code that is compiled as one unit, with the real inputs of the current call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from zgraph.analysis.hardware import Hardware
from zgraph.errors import ZgraphError, ZgraphWarning
from zgraph.runtime.handle import name_of
from zgraph.sharding.context.follow import follow_graph
from zgraph.sharding.local_shards import markers_for_reads
from zgraph.sharding.scope import Scope, scope_behind
from zgraph.tiers.tier import DEVICE, Tier
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.dynamo import compile_id, dynamo_example, raise_through_dynamo, recompile_reason
from zgraph.torch_compat.groups import is_distributed_ready


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Code that is compiled as one unit: a frame of Dynamo, or a whole training step.

    Attributes:
        name: "frame/recompile" as counted by Dynamo; "step/recompile" for a whole step.
        reason: why the frame is compiled again; "" for the first time, or if unknown.
        inputs: the frame's real inputs; None for an input that is no longer known.
        is_step: whether the frame is a whole training step, whose graph has exactly these inputs.
    """

    name: str
    reason: str
    inputs: Sequence[Any]
    is_step: bool = False

    @classmethod
    def of_dynamo(cls, gm: fx.GraphModule) -> Frame:
        """Return the frame that Dynamo is compiling; its graph gets markers in place of reads of parameters."""
        markers_for_reads(gm)
        inputs = [dynamo_example(node) for node in gm.graph.find_nodes(op="placeholder")]
        return cls(name=compile_id(), reason=recompile_reason(), inputs=inputs)

    def scopes(self) -> list[Scope]:
        """Return the scope (state shared by a sharded model) of each model whose parameters the frame reads."""
        return list(dict.fromkeys(scope for scope in map(scope_behind, self.inputs) if scope is not None))

    def spaces(self) -> dict[int, Tier]:
        """Return the memory space of each input shard that is not on the device, by position among the inputs."""
        resting = next((scope.resting for scope in self.scopes() if scope.resting is not None), None)
        if resting is None:
            return {}
        shards = {place: local_of(value) for place, value in enumerate(self.inputs) if isinstance(value, DTensor)}
        found: dict[int, Tier] = {place: resting.space_of(shard) for place, shard in shards.items()}
        return {place: space for place, space in found.items() if space != DEVICE}

    @property
    def machine(self) -> Hardware | None:
        return next((scope.machine for scope in self.scopes() if scope.machine is not None), None)

    def handle_names(self) -> dict[int, str]:
        """Return the names of parameters, by the positions of their handles among the inputs.

        A handle is the tensor through which a parameter's state is found.
        """
        names = {position: name_of(value) for position, value in enumerate(self.inputs)}
        return {position: name for position, name in names.items() if name != "?"}

    def check_batch(self) -> None:
        """Check that all ranks of a tensor-parallel group compile their first frame for the same batch.

        Raises:
            ZgraphError: their batches differ.
        """
        for scope in self.scopes():
            if scope.same_batch is not None:
                try:
                    scope.same_batch.check(self.inputs)
                except ZgraphError as error:
                    raise_through_dynamo(str(error), ZgraphError)

    def check_tokens(self, gm: fx.GraphModule) -> None:
        """Check that the frame combines tokens only as context parallelism can, if its model has a context axis.

        Args:
            gm: Dynamo's graph of the frame.

        Raises:
            ZgraphError: it does not.
        """
        for scope in self.scopes():
            if scope.context is not None:
                follow_graph(gm, scope.context.length)

    def warn_if_replicas_drift(self) -> None:
        """Warn if several ranks train a model that is not sharded, because their replicas then drift apart."""
        if not is_distributed_ready() or dist.get_world_size() == 1:
            return
        leaves = [value for value in self.inputs if isinstance(value, nn.Parameter) and value.is_leaf]
        trainable = [leaf for leaf in leaves if leaf.requires_grad]
        if trainable and not any(isinstance(value, DTensor) for value in trainable):
            warnings.warn(
                f"zgraph: {dist.get_world_size()} ranks train a model without sharded parameters, so nothing is "
                "communicated and the ranks drift apart; call zgraph.shard(model) before torch.compile.",
                ZgraphWarning,
                stacklevel=2,
            )
