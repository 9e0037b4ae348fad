"""What a run must remember besides parameters and optimizer: random numbers, and what each rank keeps for itself."""

from __future__ import annotations

import hashlib
import random
import zlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.checkpoint.safe_reader import decode, encode
from zgraph.checkpoint.together import gathered
from zgraph.errors import CheckpointError
from zgraph.runtime.window import ParameterState
from zgraph.torch_compat import is_distributed_ready, local_parameters, without_compile
from zgraph.unit import sharded_parameters, state_of


def runtime_state(model: nn.Module) -> RuntimeState:
    """What is neither parameter nor optimizer, as a `Stateful` for torch.distributed.checkpoint.

        dcp.save({"model": ..., "optimizer": ..., "runtime": zgraph.runtime_state(model)}, checkpoint_id=path)

    It holds, for each rank: the state of the random generators (torch's on CPU and on the current CUDA device, Python's
    `random`), the values of `ignored` parameters, the buffers that differ between ranks (running statistics, say),
    and the tensors that passes keep for a parameter. `save_checkpoint` includes it.

    When the number of ranks has changed, rank r takes what rank r modulo the saved number had. Where this is not the
    same rank, its generators are seeded with a hash of that state and r: equal in each repetition, different on each
    rank. Tensors that passes keep are dropped on all ranks, for they belong to a division that is no more.

    Args:
        model: sharded or not, compiled or not. Every rank calls `state_dict` and `load_state_dict`, which communicate.
    """
    return RuntimeState(model)


class RuntimeState:
    """See `runtime_state`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = without_compile(model)

    def state_dict(self) -> dict[str, Any]:
        """{"ranks": bytes}. One entry for all ranks, so that it loads on any number of them."""
        return {"ranks": encode(gathered(self.own()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's part.

        Raises:
            CheckpointError: the entry is damaged, or of another model; nothing has changed then.
        """
        ranks = decode(state_dict["ranks"], "the runtime state of a checkpoint")
        rank = dist.get_rank() if is_distributed_ready() else 0
        own = ranks[rank % len(ranks)]
        self.check(own)
        self.restore(own, len(ranks))

    def own(self) -> dict[str, Any]:
        """This rank's part, plain values and CPU tensors. Every rank calls it: buffers are compared."""
        places = self._places()
        digests = {name: _digest(tensor) for name, tensor in self.model.state_dict().items() if _is_plain(tensor)}
        differing = [name for name in digests if any(other.get(name) != digests[name] for other in gathered(digests))]
        held = {name: tensor for name, tensor in places.items() if name in differing or isinstance(tensor, DTensor)}
        kept = {name: state.tensors for name, state in self._parameter_states().items() if state.tensors}
        return {
            "random": _random_state(),
            "local": {name: _copy(tensor) for name, tensor in held.items()},
            "kept": {name: {key: _copy(value) for key, value in tensors.items()} for name, tensors in kept.items()},
        }

    def check(self, own: Any) -> None:
        """Refuse what `restore` could not restore.

        Raises:
            CheckpointError: it is of another model.
        """
        places, parameters = self._places(), self._parameter_states()
        for name, tensor in own["local"].items():
            if name not in places or _local(places[name]).shape != tensor.shape:
                raise CheckpointError(
                    f"zgraph: the checkpoint's runtime state has {name} {list(tensor.shape)}, which this model has not "
                    "or has in another shape; load it into the model that was saved."
                )
        for name in own["kept"]:
            if name not in parameters:
                raise CheckpointError(
                    f"zgraph: the checkpoint keeps runtime tensors for {name}, which is no sharded parameter of this "
                    "model; load it into the model that was saved."
                )

    @torch.no_grad()
    def restore(self, own: Any, ranks: int) -> None:
        """Put back what `own` returned on the rank that this one takes after, when there were `ranks`."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed_ready() else (0, 1)
        places = self._places()
        for name, tensor in own["local"].items():
            _local(places[name]).copy_(tensor)
        for name, state in self._parameter_states().items():
            device = _local(cast(Tensor, local_parameters(state.owner)[state.attribute])).device
            state.tensors.clear()
            if ranks == world:
                state.tensors.update({key: value.to(device) for key, value in own["kept"].get(name, {}).items()})
        _restore_random(own["random"], None if rank < ranks else rank)

    def _places(self) -> dict[str, Tensor]:
        """Buffers, and parameters of which each rank has its own values, by name in the state dict."""
        ignored = {
            id(local_parameters(part)[attribute])
            for part in self.model.modules()
            if (state := state_of(part)) is not None
            for attribute, read in state.by_attribute.items()
            if read.spec.ignored
        }
        entries = self.model.state_dict(keep_vars=True).items()
        return {name: tensor.detach() for name, tensor in entries if _is_plain(tensor) or id(tensor) in ignored}

    def _parameter_states(self) -> dict[str, ParameterState]:
        return {name: read.state for name, read in sharded_parameters(self.model).items()}


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
