"""Saves and loads error feedback: the errors that compression keeps for the next gradients.

Each of the N ranks of a parameter's mesh saves its tensors as one row of a DTensor [N, ...]. If the number of ranks has
not changed, each rank restores its own errors; otherwise all ranks restore the mean. Counts and compression methods are
saved with the rest of a rank's runtime state. Methods are compared as text, so that a checkpoint never causes an
import.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zgraph.compression.low_rank import LowRank, matrix_shape
from zgraph.compression.method_text import kind_of
from zgraph.compression.methods import SCALE_DTYPE, BlockMethod
from zgraph.compression.residual_codec import decode_error, encode_error
from zgraph.errors import CheckpointError, ZgraphWarning
from zgraph.runtime.chunks import chunk_rows, local_rows
from zgraph.runtime.collective_error import collective_error
from zgraph.runtime.error_feedback import Feedback
from zgraph.sharding.scope import ShardedParam, sharded_parameters
from zgraph.torch_compat.dtensor import sharded_rows

KEY = "feedback"  # name of the entries, in a checkpoint and in a rank's runtime state
UNSHARDED = "first_hop"  # slot whose error belongs to the unsharded gradient, on every rank
SHOWN = 5  # names in one warning

Tensors = dict[str, dict[str, dict[str, DTensor]]]  # by parameter, slot and name
Sizes = Mapping[str, Mapping[str, Mapping[str, tuple[torch.Size, torch.dtype]]]]


# --- saving -----------------------------------------------------------------------------------------------------------


def facts_of(module: nn.Module) -> dict[str, Any]:
    """Return facts about each parameter's errors, such as methods and counts, as plain values; equal on all ranks."""
    facts: dict[str, Any] = {}
    for name, param in sharded_parameters(module).items():
        feedbacks = param.state.feedbacks
        if feedbacks.by_slot or feedbacks.warmed_steps:
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
            warmup = {"warmed_steps": feedbacks.warmed_steps, "second_moment": feedbacks.second_moment}
            about = {"loss_scale": feedbacks.loss_scale, "division": _division(param), "slots": slots}
            facts[name] = {**about, **warmup}
    return facts


def tensors_of(module: nn.Module, *, copies: bool) -> Tensors:
    """Return all error tensors as DTensors [N, ...], in which this rank's tensor is one of N rows.

    Args:
        module: sharded model.
        copies: whether the rows are copies on the host.
    """
    found: Tensors = {}
    for name, param in sharded_parameters(module).items():
        for slot, feedback in param.state.feedbacks.by_slot.items():
            for key, tensor in feedback.tensors.items():
                row = tensor.detach().to("cpu", copy=True) if copies else tensor.detach()
                mesh = param.sharded.device_mesh
                found.setdefault(name, {}).setdefault(slot, {})[key] = sharded_rows(row[None], mesh, mesh.size())
    return found


def _division(param: ShardedParam) -> dict[str, int | bool]:
    """Return the sizes that determine how the elements of a parameter's error are divided among ranks."""
    layout, split = param.spec.layout, param.spec.split
    parts: dict[str, int | bool] = {} if split is None else {"tensor_parallel": split.size}
    return parts | {
        "ranks": param.sharded.device_mesh.size(),
        "group": layout.world,
        "replicas": layout.num_replicas,
        "by_rows": layout.is_sharded,
    }


# --- loading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Error feedback of one reduction in a checkpoint, and how to restore it.

    Attributes:
        name: name of the parameter.
        slot: name of the reduction.
        param: the parameter in this run.
        way: what rank r restores: "own", the error that rank r saved; "cut", the error that rank r saved, cut into
            other chunks; "mean", the mean of the errors that all ranks saved.
        fact: facts about the reduction: see `facts_of`.
        ranks: number of ranks that saved the error.
        sizes: shape and dtype of each error tensor in the checkpoint; the first dim is `ranks`.
        numel: number of elements per chunk of the gradient, in this run.
        chunks: number of chunks of the gradient, in this run.
    """

    name: str
    slot: str
    param: ShardedParam
    way: Literal["own", "cut", "mean"]
    fact: Mapping[str, Any]
    ranks: int
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]]
    numel: int
    chunks: int

    def to_read(self) -> dict[str, DTensor]:
        """Create the host tensors into which this rank reads its rows of the error."""
        return {key: empty_rows(self.param, size, dtype) for key, (size, dtype) in self.sizes.items()}

    def restored(self, tensors: Mapping[str, DTensor]) -> Feedback:
        """Build the restored error feedback from the tensors that were read; called by all ranks of the mesh."""
        local = {key: tensor.to_local() for key, tensor in tensors.items()}
        fact = self.fact
        kept = {key: rows[0] for key, rows in local.items()} if self.way == "own" else self._cut_anew(local)
        return Feedback(fact["method"], self.numel, self.chunks, kept, fact["reductions"], fact["steps"], fact["open"])

    def _cut_anew(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if _is_low_rank(self.fact):
            # The factor is equal on all ranks. Its mean may be rounded, but only its direction counts.
            sums = {key: self._summed(rows.sum(0)) for key, rows in local.items()}
            return {key: total / (self.ranks if key == "right" else self._divisor) for key, total in sums.items()}
        numel = self.param.spec.layout.numel
        flat = torch.zeros(numel)
        for row in range(local["error"].shape[0]):
            flat += flat_error({key: rows[row] for key, rows in local.items()}, self.fact["numel"], numel)
        if self.way == "mean":
            flat = self._summed(flat) / self._divisor
        group = self.sizes["error"][0][-1]
        return cut_error(flat, self.numel, self.chunks, group, quantized="error_scale" in local)

    @property
    def _divisor(self) -> int:
        """Divisor of the sum of all saved errors; the quotient is the error that each rank restores.

        If gradients are averaged, the divisor is the number of ranks that saved errors; if gradients are summed, it is
        the number of ranks that load them.
        """
        return self.ranks if self.param.spec.reduction == "mean" else self.param.sharded.device_mesh.size()

    def _summed(self, flat: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks of the parameter's mesh."""
        mesh = self.param.sharded.device_mesh
        flat = flat.to(mesh.device_type)
        for group in mesh.get_all_groups():
            try:
                dist.all_reduce(flat, group=group)
            except RuntimeError as error:
                about = [f"the errors of {self.name}"]
                raise collective_error("all_reduce", about, group.group_name, error) from error
        return flat


def empty_rows(param: ShardedParam, size: torch.Size, dtype: torch.dtype) -> DTensor:
    """Create a DTensor on the host with one row for each rank that saved the checkpoint.

    The rows are divided among the ranks of the parameter's mesh.
    """
    mesh = param.sharded.device_mesh
    rows = size[0]
    for ranks, place in zip(mesh.shape, cast("Sequence[int]", mesh.get_coordinate()), strict=True):
        rows = local_rows(rows, ranks, place)
    return sharded_rows(torch.empty((rows, *size[1:]), dtype=dtype), mesh, size[0])


def sizes_in(metadata: Metadata) -> Sizes:
    """Return shape and dtype of the error tensors in a checkpoint, by parameter, reduction and tensor name."""
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
    """Plan how to restore the errors of a checkpoint, without reading or changing anything.

    Returns:
        The errors to restore, then the names of errors to drop, such as "weight (second_hop)".

    Raises:
        CheckpointError: tensors are missing or have the wrong shape, or the model compresses by another method.
    """
    params = sharded_parameters(module)
    parts: list[Part] = []
    dropped: list[str] = []
    for name, about in facts.items():
        for slot, fact in about["slots"].items():
            found = sizes.get(name, {}).get(slot, {})
            _check_tensors(name, slot, about, fact, found)
            part = _part(name, slot, about["division"], fact, found, params.get(name))
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
    param: ShardedParam | None,
) -> Part | None:
    """Plan how to restore the error of one reduction; None if it must be dropped."""
    if param is None:
        return None
    here = _division(param)
    numel, chunks = fact["numel"], fact["chunks"]
    way: Literal["own", "cut", "mean"] = "own"
    if division != here and "tensor_parallel" in {**division, **here}:
        return None  # each rank's part of the parameter has other elements
    if division != here and _is_low_rank(fact):
        if here["ranks"] == 1:
            return None  # nothing is sent
        _check_factors(name, fact, sizes, param.spec.layout.shape)
        way = "own" if division["ranks"] == here["ranks"] else "mean"  # errors are of the unsharded gradient
    elif division != here:
        if slot != UNSHARDED or here["group"] == 1:
            return None  # the rank's part of the gradient is now on several ranks, or nothing is sent
        numel, chunks = param.spec.layout.grad_chunk.numel(), here["group"]  # for any number of hops
        same_ranks = division["ranks"] == here["ranks"]
        if sizes and not (same_ranks and (numel, chunks) == (fact["numel"], fact["chunks"])):
            kind = kind_of(fact["method"])
            if kind is None or not issubclass(kind, BlockMethod):
                return None  # only the method can interpret its tensors
            _check_error(name, fact, sizes, param.spec.layout.numel)
            way = "cut" if same_ranks else "mean"
    _check_method(name, slot, fact, numel, chunks, param)
    return Part(name, slot, param, way, fact, division["ranks"], sizes, numel, chunks)


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
            f"zgraph: the checkpoint keeps {', '.join(missing)} of {name} ({slot}), which were not read. If "
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
    """Check the shapes and dtypes of an error that must be cut into other chunks.

    Raises:
        CheckpointError: shapes and dtypes are not possible for a gradient with `numel` elements.
    """
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
            "which is not the error of a gradient of its shape; it is damaged, resume from another one."
        )


def _is_low_rank(fact: Mapping[str, Any]) -> bool:
    return kind_of(fact["method"]) is LowRank


def _check_factors(
    name: str, fact: Mapping[str, Any], sizes: Mapping[str, tuple[torch.Size, torch.dtype]], shape: Sequence[int]
) -> None:
    """Check the shapes and dtypes of the error and the factor of a low-rank reduction.

    Raises:
        CheckpointError: shapes and dtypes are not possible for a gradient of the given shape.
    """
    found = {key: (list(size), dtype) for key, (size, dtype) in sizes.items()}
    error, right = (found.get(key, ([], torch.float32)) for key in ("error", "right"))
    fits = error[0][1:] == list(matrix_shape(shape)) and right[0][2:] == error[0][2:]
    if not fits or {error[1], right[1]} != {torch.float32} or found.keys() != {"error", "right"}:
        raise CheckpointError(
            f"zgraph: the checkpoint keeps {found} of {name} for {fact['method']}, which are not the error and the "
            f"factor of a gradient of shape {list(shape)}; it is damaged, resume from another one."
        )


def _check_method(name: str, slot: str, fact: Mapping[str, Any], numel: int, chunks: int, param: ShardedParam) -> None:
    """Check that a model that has compressed already uses the checkpoint's compression method and chunks.

    Raises:
        CheckpointError: method or chunks differ.
    """
    held = param.state.feedbacks.by_slot.get(slot)
    if held is not None and (held.method, held.numel, held.chunks) != (fact["method"], numel, chunks):
        raise CheckpointError(
            f"zgraph: the checkpoint keeps an error of {name} that {fact['method']} left in {chunks} chunks of {numel} "
            f"elements, and the model compresses it by {held.method} in {held.chunks} of {held.numel}. Compile with "
            "the method that the checkpoint was saved with, or call zgraph.reset_error_feedback(model) on every rank "
            "before the load, and again after it."
        )


def read_parts(parts: Sequence[Part], read: Callable[[Tensors], None]) -> list[tuple[Part, Feedback]]:
    """Return the errors read from a checkpoint as error feedback, without changing the model; called by all ranks.

    Errors that are restored as saved are read together, all others one by one, to save memory.

    Args:
        parts: result of `plan_restore`.
        read: fills new tensors from the checkpoint; a tensor has the key (parameter, reduction, tensor name).
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
    """Replace the model's error feedback, loss scales and counts of warm-up steps by those of the checkpoint."""
    for name, param in sharded_parameters(module).items():
        param.state.feedbacks.by_slot.clear()
        param.state.feedbacks.warmed_steps = facts.get(name, {}).get("warmed_steps", 0)
        last = facts.get(name, {}).get("second_moment")
        param.state.feedbacks.second_moment = None if last is None else (last[0], last[1])
        if name in facts and facts[name]["loss_scale"] is not None:
            param.state.feedbacks.loss_scale = facts[name]["loss_scale"]
    for part, feedback in restored:
        part.param.state.feedbacks.by_slot[part.slot] = feedback


def warn_of_dropped(dropped: Sequence[str]) -> None:
    if dropped:
        more = f" and {len(dropped) - SHOWN} more" if len(dropped) > SHOWN else ""
        warnings.warn(
            "zgraph: errors that compression kept start as zeros, because they belong to another division among ranks: "
            f"{', '.join(dropped[:SHOWN])}{more}. Their share of the last gradients is lost, once; to keep it, load "
            "on the number of ranks that saved the checkpoint.",
            ZgraphWarning,
            stacklevel=3,
        )


# --- values of errors -------------------------------------------------------------------------------------------------


def flat_error(kept: Mapping[str, Tensor], numel: int, total: int) -> Tensor:
    """Return an error as a flat fp32 tensor, in the order of the parameter's elements, without padding.

    Args:
        kept: "error" [chunks, groups, group], and "error_scale" [chunks, groups] if the error is int8.
        numel: number of elements per chunk, without padding.
        total: number of elements of the parameter.
    """
    error = decode_error(kept["error"], kept["error_scale"]) if "error_scale" in kept else kept["error"]
    return error.flatten(1)[:, :numel].reshape(-1)[:total]


def cut_error(flat: Tensor, numel: int, chunks: int, group: int, *, quantized: bool) -> dict[str, Tensor]:
    """Cut a flat fp32 error into padded chunks, the inverse of `flat_error`.

    Args:
        flat: error, in the order of the parameter's elements.
        numel: number of elements per chunk.
        chunks: number of chunks.
        group: number of elements that share a scale.
        quantized: whether to encode the error in int8.

    Returns:
        "error" [chunks, groups, group], and "error_scale" [chunks, groups] if quantized.
    """
    groups = chunk_rows(numel, group)
    by_chunk = torch.nn.functional.pad(flat, (0, chunks * numel - flat.numel())).view(chunks, numel)
    error = torch.nn.functional.pad(by_chunk, (0, groups * group - numel)).view(chunks, groups, group)
    if not quantized:
        return {"error": error.contiguous()}
    codes, scale = encode_error(error)
    return {"error": codes, "error_scale": scale}
