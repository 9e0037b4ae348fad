"""What error feedback keeps, in checkpoints: each rank's own on the ranks that saved it, the mean of all on others.

Every kept tensor is stored as a DTensor [N, ...], of which each of the N ranks of the parameter's mesh writes a row.
Counts and methods are stored with the rest of a rank's runtime state. Methods are compared as text and never looked up
by the name that a checkpoint gives.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zgraph.compression.low_rank import PREFIX, matrix_shape
from zgraph.compression.methods import SCALE_DTYPE, CompressionMethod
from zgraph.compression.residual_codec import decode_error, encode_error
from zgraph.errors import CheckpointError, ZgraphWarning
from zgraph.runtime.chunks import chunk_rows, local_rows
from zgraph.runtime.collective_error import collective_error
from zgraph.runtime.error_feedback import Feedback
from zgraph.runtime.groups import group_size
from zgraph.sharding.scope import ParamSpec, ShardedParam, sharded_parameters
from zgraph.torch_compat.dtensor import sharded_rows

KEY = "feedback"  # of their entries, in a checkpoint and in a rank's runtime state
WHOLE = "first_hop"  # the slot whose error is of the whole gradient on every rank
SHOWN = 5  # names in one warning
_OWN_METHODS = f'["{CompressionMethod.__module__}:'

Tensors = dict[str, dict[str, dict[str, DTensor]]]  # by parameter, slot and name
Sizes = Mapping[str, Mapping[str, Mapping[str, tuple[torch.Size, torch.dtype]]]]


# --- saving -----------------------------------------------------------------------------------------------------------


def facts_of(module: nn.Module) -> dict[str, Any]:
    """What is known of each parameter's errors: plain values, equal on all ranks."""
    facts: dict[str, Any] = {}
    for name, read in sharded_parameters(module).items():
        feedbacks = read.state.feedbacks
        if feedbacks.by_slot:
            slots = {
                slot: {
                    "method": feedback.method,
                    "numel": feedback.numel,
                    "chunks": feedback.chunks,
                    "tensors": sorted(feedback.tensors),
                    "reductions": feedback.reductions,
                    "steps": feedback.steps,
                    "open": feedback.open,
                }
                for slot, feedback in feedbacks.by_slot.items()
            }
            facts[name] = {"loss_scale": feedbacks.loss_scale, "division": _division(read), "slots": slots}
    return facts


def tensors_of(module: nn.Module, *, copies: bool) -> Tensors:
    """The kept tensors themselves, or copies on the host, as this rank's rows of DTensors [N, ...]."""
    found: Tensors = {}
    for name, read in sharded_parameters(module).items():
        for slot, feedback in read.state.feedbacks.by_slot.items():
            for key, tensor in feedback.tensors.items():
                row = tensor.detach().to("cpu", copy=True) if copies else tensor.detach()
                mesh = read.sharded.device_mesh
                found.setdefault(name, {}).setdefault(slot, {})[key] = sharded_rows(row[None], mesh, mesh.size())
    return found


def _division(read: ShardedParam) -> dict[str, int | bool]:
    """What decides which rank keeps the error of which elements."""
    return {
        "ranks": read.sharded.device_mesh.size(),
        "group": group_size(read.spec.group_name),
        "replicas": group_size(read.spec.replicas),
        "by_rows": read.spec.zero_stage > 0,
    }


# --- loading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one reduction of a parameter has kept, and what becomes of it here.

    Attributes:
        way: "own": each rank takes what the rank in its place kept; "cut": so, but cut for other chunks; "mean": every
            rank takes the mean over the ranks that saved.
        fact: of this slot, see `facts_of`.
        ranks: that saved it.
        sizes: of its tensors in the checkpoint, [ranks, ...], with their dtypes.
        numel, chunks: how the gradient is cut here.
    """

    name: str
    slot: str
    read: ShardedParam
    way: Literal["own", "cut", "mean"]
    fact: Mapping[str, Any]
    ranks: int
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]]
    numel: int
    chunks: int

    def to_read(self) -> dict[str, DTensor]:
        """New tensors on the host for this rank's share of the rows."""
        return {key: empty_rows(self.read, size, dtype) for key, (size, dtype) in self.sizes.items()}

    def restored(self, tensors: Mapping[str, DTensor]) -> Feedback:
        """The feedback to go on with. Ranks of the mesh call it together: a mean is summed over them."""
        local = {key: tensor.to_local() for key, tensor in tensors.items()}
        fact = self.fact
        kept = {key: rows[0] for key, rows in local.items()} if self.way == "own" else self._cut_anew(local)
        return Feedback(fact["method"], self.numel, self.chunks, kept, fact["reductions"], fact["steps"], fact["open"])

    def _cut_anew(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if _is_low_rank(self.fact):
            # The factor is the same on all ranks; as a mean it may be rounded, and only its direction counts.
            sums = {key: self._summed(rows.sum(0)) for key, rows in local.items()}
            return {key: total / (self.ranks if key == "right" else self._divisor) for key, total in sums.items()}
        numel = math.prod(self.read.spec.shape)
        whole = torch.zeros(numel)
        for row in range(local["error"].shape[0]):
            whole += flat_error({key: rows[row] for key, rows in local.items()}, self.fact["numel"], numel)
        if self.way == "mean":
            whole = self._summed(whole) / self._divisor
        group = self.sizes["error"][0][-1]
        return cut_error(whole, self.numel, self.chunks, group, quantized="error_scale" in local)

    @property
    def _divisor(self) -> int:
        """What the ranks together have not sent stays the same: a part of a mean, or of a sum."""
        return self.ranks if self.read.spec.reduction == "mean" else self.read.sharded.device_mesh.size()

    def _summed(self, whole: Tensor) -> Tensor:
        """The sum over the ranks of the mesh."""
        mesh = self.read.sharded.device_mesh
        whole = whole.to(mesh.device_type)
        for group in mesh.get_all_groups():
            try:
                dist.all_reduce(whole, group=group)
            except RuntimeError as error:
                about = [f"the errors of {self.name}"]
                raise collective_error("all_reduce", about, group.group_name, error) from error
        return whole


def empty_rows(read: ShardedParam, size: torch.Size, dtype: torch.dtype) -> DTensor:
    """[N, ...] for the N ranks that saved, on the host: each rank of the parameter's mesh here has a share of rows."""
    mesh = read.sharded.device_mesh
    rows = size[0]
    for ranks, place in zip(mesh.shape, cast("Sequence[int]", mesh.get_coordinate()), strict=True):
        rows = local_rows(rows, ranks, place)
    return sharded_rows(torch.empty((rows, *size[1:]), dtype=dtype), mesh, size[0])


def sizes_in(metadata: Metadata) -> Sizes:
    """The kept tensors that a checkpoint has, wherever in it."""
    found: dict[str, dict[str, dict[str, tuple[torch.Size, torch.dtype]]]] = {}
    paths = cast("dict[str, tuple[str | int, ...]]", metadata.planner_data or {})
    for key, path in paths.items():
        entry = metadata.state_dict_metadata.get(key)
        if len(path) >= 4 and path[-4] == KEY and isinstance(entry, TensorStorageMetadata) and len(entry.size) > 0:
            name, slot, kept = map(str, path[-3:])
            found.setdefault(name, {}).setdefault(slot, {})[kept] = (entry.size, entry.properties.dtype)
    return found


def sizes_of(tensors: Tensors) -> Sizes:
    return {
        name: {
            slot: {key: (tensor.shape, tensor.dtype) for key, tensor in kept.items()} for slot, kept in slots.items()
        }
        for name, slots in tensors.items()
    }


def plan_restore(facts: Mapping[str, Any], sizes: Sizes, module: nn.Module) -> tuple[list[Part], list[str]]:
    """What becomes of every error in a checkpoint; nothing is changed or read yet.

    Returns:
        Parts to restore; what is dropped, "weight (second_hop)" each.

    Raises:
        CheckpointError: tensors are missing or have the wrong shape, or the model compresses by another method.
    """
    reads = sharded_parameters(module)
    parts: list[Part] = []
    dropped: list[str] = []
    for name, about in facts.items():
        for slot, fact in about["slots"].items():
            found = sizes.get(name, {}).get(slot, {})
            _check_tensors(name, slot, about, fact, found)
            part = _part(name, slot, about["division"], fact, found, reads.get(name))
            if part is not None:
                parts.append(part)
            elif found:
                dropped.append(f"{name} ({slot})")
    return parts, dropped


def _part(
    name: str,
    slot: str,
    division: Mapping[str, Any],
    fact: Mapping[str, Any],
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]],
    read: ShardedParam | None,
) -> Part | None:
    """None: there is no place for it here."""
    if read is None:
        return None
    here = _division(read)
    numel, chunks = fact["numel"], fact["chunks"]
    way: Literal["own", "cut", "mean"] = "own"
    if division != here and _is_low_rank(fact):
        if here["ranks"] == 1:
            return None  # nothing is sent
        _check_factors(name, fact, sizes, read.spec.shape)
        way = "own" if division["ranks"] == here["ranks"] else "mean"  # of the whole gradient, however it is split
    elif division != here:
        if slot != WHOLE or here["group"] == 1:
            return None  # it belongs to a part of the gradient that no rank has alone now, or nothing is sent
        numel, chunks = _cut_here(read.spec)
        same_ranks = division["ranks"] == here["ranks"]
        if sizes and not (same_ranks and (numel, chunks) == (fact["numel"], fact["chunks"])):
            if not fact["method"].startswith(_OWN_METHODS):
                return None  # only the method knows what its tensors mean
            _check_error(name, fact, sizes, math.prod(read.spec.shape))
            way = "cut" if same_ranks else "mean"
    _check_method(name, slot, fact, numel, chunks, read)
    return Part(name, slot, read, way, fact, division["ranks"], sizes, numel, chunks)


def _cut_here(spec: ParamSpec) -> tuple[int, int]:
    """Elements of a chunk, and chunks, of the whole gradient, however many hops they travel."""
    chunks, rows = group_size(spec.group_name), spec.shape[0]
    if spec.zero_stage == 0:
        return chunk_rows(math.prod(spec.shape), chunks), chunks
    return chunk_rows(rows, chunks) * math.prod(spec.shape[1:]), chunks


def _check_tensors(
    name: str,
    slot: str,
    about: Mapping[str, Any],
    fact: Mapping[str, Any],
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    missing = sorted(set(fact["tensors"]) - sizes.keys())
    if missing:
        raise CheckpointError(
            f"zgraph: the checkpoint keeps {', '.join(missing)} of {name} ({slot}), which were not read. Where "
            "torch.distributed.checkpoint loads, write zgraph.runtime_state(model, load_from=path); otherwise the "
            "checkpoint is damaged, resume from another one."
        )
    rows = {key: list(size) for key, (size, _) in sizes.items() if size[0] != about["division"]["ranks"]}
    if rows:
        raise CheckpointError(
            f"zgraph: the checkpoint keeps {rows} of {name} ({slot}), where {about['division']['ranks']} ranks have "
            "saved a row each; it is damaged, resume from another one."
        )


def _check_error(
    name: str, fact: Mapping[str, Any], sizes: Mapping[str, tuple[torch.Size, torch.dtype]], numel: int
) -> None:
    """The tensors of zgraph's own methods, for they are about to be decoded."""
    shape, dtype = sizes.get("error", (torch.Size([]), torch.float32))
    groups = chunk_rows(fact["numel"], shape[-1]) if len(shape) == 4 and shape[-1] else -1
    wanted = {"error": ((fact["chunks"], groups), dtype)}
    if dtype != torch.float32:
        wanted = {
            "error": ((fact["chunks"], groups), torch.int8),
            "error_scale": ((fact["chunks"], groups), SCALE_DTYPE),
        }
    found = {key: (tuple(size[1:3]), dtype) for key, (size, dtype) in sizes.items()}
    if found != wanted or fact["chunks"] * fact["numel"] < numel:
        shown = {key: (list(size), dtype) for key, (size, dtype) in sizes.items()}
        raise CheckpointError(
            f"zgraph: the checkpoint keeps {shown} of {name} in {fact['chunks']} chunks of {fact['numel']} elements, "
            "which is no error of a gradient of its shape; it is damaged, resume from another one."
        )


def _is_low_rank(fact: Mapping[str, Any]) -> bool:
    return str(fact["method"]).startswith(PREFIX)


def _check_factors(
    name: str, fact: Mapping[str, Any], sizes: Mapping[str, tuple[torch.Size, torch.dtype]], shape: Sequence[int]
) -> None:
    """The tensors of a low-rank reduction, for they are about to be summed."""
    found = {key: (list(size), dtype) for key, (size, dtype) in sizes.items()}
    error, right = (found.get(key, ([], torch.float32)) for key in ("error", "right"))
    fits = error[0][1:] == list(matrix_shape(shape)) and right[0][2:] == error[0][2:]
    if not fits or {error[1], right[1]} != {torch.float32} or found.keys() != {"error", "right"}:
        raise CheckpointError(
            f"zgraph: the checkpoint keeps {found} of {name} for {fact['method']}, which are not the error and the "
            f"factor of a gradient of shape {list(shape)}; it is damaged, resume from another one."
        )


def _check_method(name: str, slot: str, fact: Mapping[str, Any], numel: int, chunks: int, read: ShardedParam) -> None:
    """Where the model has compressed already it is known by what."""
    held = read.state.feedbacks.by_slot.get(slot)
    if held is not None and (held.method, held.numel, held.chunks) != (fact["method"], numel, chunks):
        raise CheckpointError(
            f"zgraph: the checkpoint keeps an error of {name} that {fact['method']} left in {chunks} chunks of {numel} "
            f"elements, and the model compresses it by {held.method} in {held.chunks} of {held.numel}. Compile with "
            "the method that the checkpoint was saved with, or call zgraph.reset_error_feedback(model) on every rank "
            "before the load, and again after it."
        )


def read_parts(parts: Sequence[Part], read: Callable[[Tensors], None]) -> list[tuple[Part, Feedback]]:
    """Read the parts and make of them what is to be kept; the model is not changed. Every rank calls it.

    Of what the ranks have kept no rank holds more than its own, and, where errors are cut anew, its share of those of
    one parameter.

    Args:
        parts: from `plan_restore`.
        read: fills new tensors, by parameter, slot and name, from the checkpoint; every rank calls it alike.
    """
    own = [part for part in parts if part.way == "own"]
    restored: list[tuple[Part, Feedback]] = []
    for batch in (own, *([part] for part in parts if part.way != "own")):
        wanted: Tensors = {}
        for part in batch:
            if part.sizes:
                wanted.setdefault(part.name, {})[part.slot] = part.to_read()
        if wanted:
            read(wanted)
        for part in batch:
            restored.append((part, part.restored(wanted[part.name][part.slot] if part.sizes else {})))
    return restored


def put_back(module: nn.Module, facts: Mapping[str, Any], restored: Sequence[tuple[Part, Feedback]]) -> None:
    """Keep what was restored, and nothing else."""
    for name, read in sharded_parameters(module).items():
        read.state.feedbacks.by_slot.clear()
        if name in facts and facts[name]["loss_scale"] is not None:
            read.state.feedbacks.loss_scale = facts[name]["loss_scale"]
    for part, feedback in restored:
        part.read.state.feedbacks.by_slot[part.slot] = feedback


def warn_of_dropped(dropped: Sequence[str]) -> None:
    if dropped:
        more = f" and {len(dropped) - SHOWN} more" if len(dropped) > SHOWN else ""
        warnings.warn(
            "zgraph: errors that compression kept start as zeros, for they belong to a division among ranks that is "
            f"no more: {', '.join(dropped[:SHOWN])}{more}. What they held of the last gradients is lost, once; to "
            "keep it, load on as many ranks as saved the checkpoint.",
            ZgraphWarning,
            stacklevel=3,
        )


# --- kept errors as numbers -------------------------------------------------------------------------------------------


def flat_error(kept: Mapping[str, Tensor], numel: int, total: int) -> Tensor:
    """An error in the parameter's own element order, in fp32.

    Args:
        kept: "error" [chunks, groups, group], and "error_scale" [chunks, groups] where that is int8.
        numel: elements of a chunk; what fills its last group up is left out.
        total: elements of the parameter; what fills its last chunks up is left out.
    """
    error = decode_error(kept["error"], kept["error_scale"]) if "error_scale" in kept else kept["error"]
    return error.flatten(1)[:, :numel].reshape(-1)[:total]


def cut_error(flat: Tensor, numel: int, chunks: int, group: int, *, quantized: bool) -> dict[str, Tensor]:
    """The inverse of `flat_error`; in int8 as the kernels keep errors."""
    groups = chunk_rows(numel, group)
    whole = torch.nn.functional.pad(flat, (0, chunks * numel - flat.numel())).view(chunks, numel)
    error = torch.nn.functional.pad(whole, (0, groups * group - numel)).view(chunks, groups, group)
    if not quantized:
        return {"error": error.contiguous()}
    codes, scale = encode_error(error)
    return {"error": codes, "error_scale": scale}
