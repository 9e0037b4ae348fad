"""The cluster that a plan is for, with a fake process group whose collectives send nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph.analysis.cuda_workspace import resting_bytes
from zgraph.analysis.hardware import Hardware
from zgraph.compiler.pass_list import PassList
from zgraph.compiler.target import Target
from zgraph.errors import ZgraphError, check_kind
from zgraph.passes import presets
from zgraph.planner.planned_step import PlannedGraph
from zgraph.planner.schedules.axes import Axes
from zgraph.sharding.scope import scopes_of, sharded_parameters
from zgraph.sharding.shard import shard
from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.groups import fake_world, groups_of_ranks, is_distributed_ready

Sharder = Callable[..., object]
SHARD_ON_AXES = (
    "write a function of model and mesh that parallelizes and then shards: parallelize_module(model, mesh["
    '"tp"], ...); zgraph.shard(model, mesh["dp"]).'
)


@dataclass
class Cluster:
    """Description of the cluster that a plan is for.

    Attributes:
        name: name of the planning function, for error messages.
        axes: axes of the cluster; None if only the number of ranks was given.
        ranks: number of ranks.
        machine: hardware of each rank.
        passes: list of passes, whose `target` is set.
    """

    name: str
    axes: Axes | None
    ranks: int
    machine: Hardware
    passes: PassList

    @classmethod
    def of(
        cls,
        name: str,
        axes: Axes | None,
        ranks: int,
        hardware: Hardware | str,
        passes: PassList | Sequence[Any] | None,
    ) -> Cluster:
        """Check the options of a plan, and return the cluster that they describe.

        Raises:
            ValueError: the hardware preset is unknown, or passes are not a list of passes.
            ZgraphError: this process is in a process group.
        """
        if is_distributed_ready():
            raise ZgraphError(
                f"{name}: this process is in a process group already, and a plan needs one of its own; call it in a "
                "process that was not started by torchrun, or after destroy_process_group()."
            )
        target = Target(hardware=Hardware.preset(hardware) if isinstance(hardware, str) else hardware)
        chosen = PassList.made_of(presets.default() if passes is None else passes, f"{name}: passes", target)
        if chosen.target is None:
            chosen = replace(chosen, target=target)
        assert chosen.target is not None
        return cls(name, axes, ranks, chosen.target.hardware, chosen)

    @contextmanager
    def joined(self) -> Generator[tuple[DeviceMesh | None, Any]]:
        """Make this process rank 0 of a fake cluster inside the `with`; yield the mesh of its axes, and a fake mode."""
        with fake_world(self.ranks):
            yield None if self.axes is None else self.axes.mesh(), fake_mode()

    def made(self, mode: Any, model_fn: Callable[[], Any], batch: Callable[[], Any]) -> tuple[Any, tuple[Any, ...]]:
        """Return the model and the inputs of its forward, as fake tensors.

        Raises:
            ValueError: `batch` returns anything but a tuple.
        """
        with mode:
            model, inputs = model_fn(), batch()
        if not isinstance(inputs, tuple | list):
            raise ValueError(
                f"{self.name}: batch returned a {type(inputs).__name__}; return the tuple of forward's arguments, such "
                "as (tokens,) if there is one."
            )
        return model, tuple(inputs)

    def libraries_bytes(self) -> tuple[int, int]:
        """Bytes that cuBLAS workspaces and NCCL communicators use on each rank."""
        return resting_bytes(self.machine.backend, self.machine.flops_per_us, groups_of_ranks())

    def shard(self, shard_fn: Sharder, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Call the user's `shard_fn` on a model, with the mesh of all axes except the pipeline's.

        Raises:
            ValueError: the function accepts no mesh although there are several axes, or shards over the wrong axes.
        """
        axes = self.axes
        if axes is None or mesh is None:
            shard_fn(model)
            return
        shares = axes.sizes.get("cp", 1) > 1 and axes.stages == 1
        if shares and shard_fn is shard:
            shard_fn = partial(shard, context="cp")
        if _takes_a_mesh(shard_fn):
            shard_fn(model, mesh[axes.inner])
        elif axes.inner == tuple(axes.sizes) == ("dp",):
            shard_fn(model)
        else:
            raise ValueError(
                f"{self.name}: shard_fn accepts only the model, and a cluster of {axes} has several axes; "
                f"{SHARD_ON_AXES}"
            )
        if shares and all(scope.context is None for scope in scopes_of(model)):
            raise ValueError(
                f"{self.name}: shard_fn shares no sequences over the axis cp of {axes}; write zgraph.shard(model, "
                'mesh, context="cp") in it, or name the axis dp.'
            )
        for name, param in sharded_parameters(model).items():
            layout = param.spec.layout
            used = [axes.along(group) for group in (layout.gather_group, layout.replica_group) if group]
            if any("tp" in axis.split(" x ") for axis in used):
                raise ValueError(
                    f"{self.name}: shard_fn shards {name} over the tensor-parallel axis tp as well, as if it were "
                    f"data-parallel; {SHARD_ON_AXES}"
                )

    def check_tensor_parallel(self, graphs: Sequence[PlannedGraph]) -> None:
        """Refuse a tensor-parallel axis without any communication: all its ranks would compute the same."""
        sizes: Mapping[str, int] = {} if self.axes is None else self.axes.sizes
        if sizes.get("tp", 1) > 1 and not any("tp" in graph.traffic for graph in graphs):
            raise ValueError(
                f"{self.name}: nothing travels over the axis tp of {self.axes}, whose ranks all compute the same; "
                f"shard_fn parallelizes nothing over it: {SHARD_ON_AXES}"
            )


def check_functions(name: str, model_fn: object, batch: object) -> None:
    """Refuse a model or a batch where a function that makes one is expected, since a plan needs fake tensors."""
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise ValueError(
            f"{name}: model_fn is a {type(model_fn).__name__}; pass a function that makes the model, such as "
            "lambda: Net(), so that it is built without memory for its parameters."
        )
    instead = "pass a function that returns the tuple of forward's arguments, such as lambda: (torch.zeros(8, 1024),)"
    check_kind(f"{name}: batch", batch, Callable, instead)


def _takes_a_mesh(shard_fn: Sharder) -> bool:
    try:
        inspect.signature(shard_fn).bind(None, None)
    except TypeError:
        return False
    return True
