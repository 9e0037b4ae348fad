"""Checkpoints of pipelines, in which ranks have different parameters: checks names, and merges optimizer groups."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from zgraph.checkpoint.all_ranks import gathered
from zgraph.errors import CheckpointError


def check_names(state: Mapping[str, Any], group: ProcessGroup | None) -> None:
    """Check that different parameters on different ranks have different names.

    Raises:
        CheckpointError: on all ranks, with the name that two parameters share.
    """
    meshes = {
        name: tuple(value.device_mesh.mesh.flatten().tolist())
        for name, value in state.items()
        if isinstance(value, DTensor)
    }
    if _equal_on_all_ranks(meshes, group):
        return
    found: dict[str, tuple[int, ...]] = {}
    for of_rank in gathered(meshes, group):
        for name, ranks in of_rank.items():
            if found.setdefault(name, ranks) != ranks:
                raise CheckpointError(
                    f"zgraph.save_checkpoint: {name} is a parameter of ranks {list(found[name])} and another one of "
                    f"ranks {list(ranks)}, and one would overwrite the other. Give the stages of a pipeline names of "
                    "their own: save nn.ModuleDict({str(number): chunk ...}) with the number of each chunk's stage. "
                    "Sites of zgraph.OuterSteps save one checkpoint each: pass the ranks of a site, as in "
                    'group=mesh["dp"], and another directory for each site.'
                )


def merged_groups(groups: list[dict[str, Any]], group: ProcessGroup | None) -> list[dict[str, Any]]:
    """Merge each optimizer group over all ranks; the merged group lists the parameters of all ranks.

    Raises:
        CheckpointError: on all ranks, if ranks differ in the number of groups, or in the options of a group.
    """
    if _equal_on_all_ranks(groups, group):
        return groups
    everywhere: list[list[dict[str, Any]]] = gathered(groups, group)
    for rank, others in enumerate(everywhere):
        if len(others) != len(everywhere[0]):
            raise CheckpointError(
                f"zgraph.save_checkpoint: the optimizer has {len(others)} groups on rank {rank} and "
                f"{len(everywhere[0])} on rank 0; give it the same groups on all ranks, some without parameters."
            )
        for number, (first, other) in enumerate(zip(everywhere[0], others, strict=True)):
            differing = [
                name
                for name in first | other
                if name != "params" and _printed(first.get(name)) != _printed(other.get(name))
            ]
            if differing:
                raise CheckpointError(
                    f"zgraph.save_checkpoint: group {number} of the optimizer has {differing[0]}="
                    f"{other.get(differing[0])} on rank {rank} and {first.get(differing[0])} on rank 0; make them "
                    "groups of their own on all ranks, some without parameters."
                )
    return [
        {**own, "params": list(dict.fromkeys(name for others in everywhere for name in others[number]["params"]))}
        for number, own in enumerate(groups)
    ]


def names_of_no_rank(others: Sequence[str], group: ProcessGroup | None) -> list[str]:
    """Return the names in a checkpoint that the model lacks on every rank.

    Args:
        others: names in the checkpoint that this rank's model lacks.
    """
    everywhere: list[Sequence[str]] = gathered(list(others), group)
    lacking = set(everywhere[0]).intersection(*everywhere[1:])
    return [name for name in others if name in lacking]


def of_this_stage(own: dict[str, Any], others: set[str]) -> dict[str, Any]:
    """Return a rank's saved state without the entries of parameters of other pipeline stages; error feedback stays.

    Args:
        own: saved state of a rank.
        others: names of parameters of other stages.
    """
    runtime = own["runtime"]
    kept = {key: {name: one for name, one in runtime[key].items() if name not in others} for key in ("local", "kept")}
    optimizer = {name: one for name, one in own["optimizer"].items() if name not in others}
    return {**own, "runtime": {**runtime, **kept}, "optimizer": optimizer}


def _equal_on_all_ranks(value: Any, group: ProcessGroup | None) -> bool:
    return len(set(gathered(zlib.crc32(repr(_printed(value)).encode()), group))) == 1


def _printed(value: Any) -> Any:
    """Replace tensors in nested containers by lists of numbers, whose text has all digits."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _printed(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_printed(one) for one in cast("Sequence[Any]", value)]
    return value
