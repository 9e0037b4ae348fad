"""The limit on the bytes that a step keeps on the host of each rank."""

from __future__ import annotations

from zgraph.tiers.offload import Offload
from zgraph.tiers.staging import MOST_STAGING_BYTES


def check_host_budget(
    offload: Offload, params_bytes: int, state_bytes: int, step_bytes: int, staging_bytes: int, *, on_gpu: bool
) -> None:
    """Refuse a step that keeps more on the host than the budget allows.

    Args:
        offload: the user's options.
        params_bytes: bytes of parameters stored on the host, on the rank with the most.
        state_bytes: bytes of optimizer state stored on the host, on the rank with the most.
        step_bytes: further bytes of the step on the host at its peak: activations and staging buffers.
        staging_bytes: the part of `step_bytes` that staging buffers between disk and GPU use.
        on_gpu: whether all computation runs on a GPU.

    Raises:
        ValueError: the step exceeds the budget; the message gives both sizes, and options that fit.
    """
    budget = offload.host_budget_bytes
    host_bytes = params_bytes + state_bytes + step_bytes
    if budget is None or host_bytes <= budget:
        return
    activations_bytes = step_bytes - staging_bytes
    parts = [f"{params_bytes} of parameters", f"{state_bytes} of the optimizer's state"]
    parts += [f"{activations_bytes} of activations"] if activations_bytes else []
    parts += [f"{staging_bytes} of buffers between disk and GPU"] if staging_bytes else []
    most = MOST_STAGING_BYTES if on_gpu or staging_bytes else 0  # for tensors moved to disk
    choices = {
        'With optimizer="disk", and a path,': params_bytes + activations_bytes + most,
        'With params="disk", and a path,': state_bytes + activations_bytes + most,
        "Without offload_activations": params_bytes + state_bytes + staging_bytes,
        'With both on "disk", and a path,': activations_bytes + most,
        'With both on "disk", a path, and without offload_activations': most,
    }
    fits = next((name for name, left in choices.items() if left <= budget and left < host_bytes), None)
    ways = [f"{fits} {'at most ' if most else ''}{choices[fits]} bytes would be left there; or use"] if fits else []
    raise ValueError(
        f"zgraph.Offload: the step keeps {host_bytes} bytes on the host of each rank, {', '.join(parts[:-1])} and "
        f"{parts[-1]}, and host_budget_bytes={budget}. {ways[0] if ways else 'Use'} more ranks, or "
        f"host_budget_bytes={host_bytes}."
    )
