"""State of a run besides parameters and optimizer state, such as random generators and each rank's own buffers."""

from __future__ import annotations

import hashlib
import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from zgraph.checkpoint import error_feedback as error_feedback
from zgraph.checkpoint.all_ranks import gathered, rank_and_world, run_on_all_ranks
from zgraph.checkpoint.safe_reader import decode, encode, read_metadata
from zgraph.errors import CheckpointError
from zgraph.runtime.error_feedback import Feedback
from zgraph.runtime.window_state import ParameterState
from zgraph.sharding.scope import sharded_parameters, state_of
from zgraph.torch_compat.dynamo import without_compile
from zgraph.torch_compat.modules import local_parameters


def runtime_state(model: nn.Module, *, load_from: str | os.PathLike[str] | None = None) -> RuntimeState:
    """Return the state that is neither parameter nor optimizer, as a `Stateful` for torch.distributed.checkpoint (DCP).

        dcp.save({"model": ..., "optimizer": ..., "runtime": zgraph.runtime_state(model)}, checkpoint_id=path)
        dcp.load({..., "runtime": zgraph.runtime_state(model, load_from=path)}, checkpoint_id=path)

    `save_checkpoint` includes this state. It contains, for each rank:

    - the states of the random generators: torch's on the CPU and on the current CUDA device, and Python's `random`;
    - `ignored` parameters, and buffers that differ between ranks, such as running statistics;
    - tensors that passes keep for a parameter;
    - the error feedback of compression.

    If N ranks have saved and another number M of ranks loads:

    - Rank r restores the state of rank r modulo N. If r >= N, its random generators are seeded with a hash of that
      state and r, so that all ranks draw different numbers.
    - Tensors that passes keep are dropped, because they depend on how parameters are divided among ranks.
    - For unsharded gradients, each rank restores the mean error over the N ranks, divided and quantized anew. The total
      error of all ranks stays the same, except for the quantization.
    - Other errors are dropped, and a `ZgraphWarning` names them: errors of a second hop, of gathered means and of
      user-defined compression methods, and all errors if nothing is sent any more.

    If only the ZeRO stage has changed, each rank restores its own error, divided anew. Errors of another compression
    method are refused: by the load if the model has already compressed, otherwise by the model's first reduction.

    Errors are separate entries of the checkpoint, "feedback.<parameter>.<slot>.<tensor>". DCP reads only entries that
    the model also has, so pass `load_from`; a load that would leave out errors is refused. During the load, a
    rank holds all rows that it reads, up to ceil(N / M) per parameter. `load_checkpoint` needs less memory: it reads
    one parameter at a time if errors must be divided anew.

    Args:
        model: model, sharded or not, compiled or not. Every rank must call `state_dict` and `load_state_dict`, because
            they communicate.
        load_from: checkpoint that torch.distributed.checkpoint is about to load; None when saving.
    """
    return RuntimeState(model, None if load_from is None else Path(load_from))


class RuntimeState:
    """A model's runtime state for torch.distributed.checkpoint: see `runtime_state`."""

    def __init__(self, model: nn.Module, load_from: Path | None = None, group: ProcessGroup | None = None) -> None:
        self.model = without_compile(model)
        self.load_from, self.group = load_from, group

    def state_dict(self) -> dict[str, Any]:
        """Return {"ranks": bytes, "feedback": {...}}; called by every rank.

        "ranks" is a single entry for all ranks, so that any number of ranks can load it. "feedback" exists only if
        there are errors: copies on the host when saving, or new tensors to load into with `load_from`.
        """
        if self.load_from is None:
            errors = error_feedback.tensors_of(self.model, copies=True)
        else:
            errors = self._errors_to_load(self.load_from)
        return {"ranks": encode(gathered(self.own(), self.group)), **({error_feedback.KEY: errors} if errors else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's part of a saved state; called by every rank.

        Raises:
            CheckpointError: an entry is damaged, missing, or of another model; nothing was changed.
        """
        errors: error_feedback.Tensors = state_dict.get(error_feedback.KEY, {})

        def prepare() -> tuple[Any, int, list[error_feedback.Part], list[str]]:
            ranks = decode(state_dict["ranks"], "the runtime state of a checkpoint")
            own = ranks[rank_and_world(self.group)[0] % len(ranks)]
            self.check(own)
            facts = own.get(error_feedback.KEY, {})
            return own, len(ranks), *error_feedback.plan_restore(facts, error_feedback.sizes_of(errors), self.model)

        own, ranks, parts, dropped = run_on_all_ranks("runtime_state", prepare, group=self.group)
        restored = [(part, part.restored(errors[part.name][part.slot] if part.sizes else {})) for part in parts]
        self.restore(own, ranks, restored)
        error_feedback.warn_of_dropped(dropped)

    def _errors_to_load(self, path: Path) -> error_feedback.Tensors:
        found = run_on_all_ranks(
            "runtime_state", group=self.group, action=lambda: error_feedback.sizes_in(read_metadata(path))
        )
        params = sharded_parameters(self.model)
        return {
            name: {
                slot: {key: error_feedback.empty_rows(params[name], *size) for key, size in kept.items()}
                for slot, kept in slots.items()
            }
            for name, slots in found.items()
            if name in params
        }

    def own(self) -> dict[str, Any]:
        """Return this rank's state as plain values and CPU tensors.

        Every rank must call this, because ranks compare their buffers.
        """
        places = self._places()
        digests = {name: _digest(tensor) for name, tensor in self.model.state_dict().items() if _is_plain(tensor)}
        everywhere: list[dict[str, int]] = gathered(digests, self.group)  # stages of a pipeline have other buffers
        differing = [
            name for name in digests if any(other.get(name, digests[name]) != digests[name] for other in everywhere)
        ]
        held = {name: tensor for name, tensor in places.items() if name in differing or isinstance(tensor, DTensor)}
        kept = {name: state.tensors for name, state in self._parameter_states().items() if state.tensors}
        return {
            "random": _random_state(),
            "local": {name: _copy(tensor) for name, tensor in held.items()},
            "kept": {name: {key: _copy(value) for key, value in tensors.items()} for name, tensors in kept.items()},
            "codes": self._codes(),
            error_feedback.KEY: error_feedback.facts_of(self.model),
        }

    def check(self, own: Any) -> None:
        """Check that a rank's saved state fits this model, as `restore` needs.

        Raises:
            CheckpointError: the state belongs to another model.
        """
        places, parameters = self._places(), self._parameter_states()
        for name, tensor in own["local"].items():
            if name not in places or _local(places[name]).shape != tensor.shape:
                raise CheckpointError(
                    f"zgraph: the checkpoint's runtime state has {name} {list(tensor.shape)}, which this model lacks "
                    "or has in another shape; load it into the model that was saved."
                )
        ours, theirs = self._codes(), own.get("codes", {})
        name = next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None)
        if name is not None:
            saved, present = theirs.get(name, "it is"), ours.get(name, "it is")
            raise CheckpointError(
                f"zgraph: {name} is stored as {saved} in the checkpoint, and as {present} in this model; codes are "
                "loaded with the same zgraph.Offload, stage and number of ranks. To change these, load weights before "
                "zgraph.shard, from zgraph.full_state_dict for example."
            )
        for name in own["kept"]:
            if name not in parameters:
                raise CheckpointError(
                    f"zgraph: the checkpoint keeps runtime tensors for {name}, which is not a sharded parameter of "
                    "this model; load it into the model that was saved."
                )

    @torch.no_grad()
    def restore(self, own: Any, ranks: int, errors: Sequence[tuple[error_feedback.Part, Feedback]]) -> None:
        """Restore a rank's saved state and its error feedback.

        Args:
            own: state that rank r modulo `ranks` has saved, where r is the number of this rank.
            ranks: number of ranks that saved.
            errors: restored error feedback of each reduction.
        """
        rank, world = rank_and_world(self.group)
        places = self._places()
        for name, tensor in own["local"].items():
            _local(places[name]).copy_(tensor)
        for name, state in self._parameter_states().items():
            device = _local(cast(Tensor, local_parameters(state.owner)[state.attribute])).device
            state.tensors.clear()
            if ranks == world:
                state.tensors.update({key: value.to(device) for key, value in own["kept"].get(name, {}).items()})
        error_feedback.put_back(self.model, own.get(error_feedback.KEY, {}), errors)
        _restore_random(own["random"], None if rank < ranks else rank)

    def _places(self) -> dict[str, Tensor]:
        """Return the model's buffers and `ignored` parameters, by name in the state dict."""
        ignored = {
            id(local_parameters(part)[attribute])
            for part in self.model.modules()
            if (state := state_of(part)) is not None
            for attribute, param in state.by_attribute.items()
            if param.spec.ignored
        }
        entries = self.model.state_dict(keep_vars=True).items()
        return {name: tensor.detach() for name, tensor in entries if _is_plain(tensor) or id(tensor) in ignored}

    def _codes(self) -> dict[str, str]:
        """Describe the format of each weight that is stored as quantized codes.

        The sizes of two formats may be equal, so a load compares these descriptions.
        """
        codes = {name: param.spec.codes for name, param in sharded_parameters(self.model).items()}
        return {
            name: f"codes of {one.method}, {one.numel} elements on each of {one.world} ranks"
            for name, one in codes.items()
            if one is not None
        }

    def _parameter_states(self) -> dict[str, ParameterState]:
        return {name: param.state for name, param in sharded_parameters(self.model).items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor | nn.Parameter)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(tensor: Tensor) -> Tensor:
    return _local(tensor).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(encode(_copy(tensor)))


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random(state: dict[str, Any], derive_for: int | None) -> None:
    if derive_for is None:
        torch.set_rng_state(state["cpu"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        return
    seed = hashlib.sha256(bytes(state["cpu"].tolist()) + derive_for.to_bytes(8, "little")).digest()[:8]
    torch.manual_seed(int.from_bytes(seed, "little", signed=True))  # CUDA's generators too
    random.seed(seed)
