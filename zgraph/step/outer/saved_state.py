"""States of outer steps in checkpoints: plain tensors, numbers and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.step.outer.rounds import Anchor, State


def saved(anchor: Anchor) -> dict[str, Any]:
    """Return the state of an anchor; tensors are not copied."""
    state = anchor.state
    return {
        "parameters": list(anchor.fragment.names),
        "values": state.values,
        "momentum": state.momentum,
        "errors": [list(errors) for errors in state.errors],
        "sites": state.sites,
        "site": state.site,
        "rounds": state.rounds,
    }


def restored(anchors: Sequence[Anchor], entries: Sequence[Mapping[str, Any]]) -> list[State]:
    """Return the states to give to anchors; those of another site have zeros for momentum and errors.

    Args:
        anchors: anchors of a run.
        entries: results of `saved`.

    Raises:
        ZgraphError: the entries belong to another run.
    """
    if [one["parameters"] for one in entries] != [list(one.fragment.names) for one in anchors]:
        raise ZgraphError(
            "zgraph.OuterSteps: the state has other fragments; load it with the options that it was saved with."
        )
    return [_restored(anchor, entry) for anchor, entry in zip(anchors, entries, strict=True)]


def _restored(anchor: Anchor, entry: Mapping[str, Any]) -> State:
    own, values = anchor.state, entry["values"]
    if values.shape != own.values.shape:
        raise ZgraphError(
            f"zgraph.OuterSteps: the state has {values.numel()} elements of {entry['parameters'][0]} and the others of "
            f"its fragment, this rank {own.values.numel()}; load it on as many ranks of a site, at the same stage."
        )
    if (entry["sites"], entry["site"]) != (own.sites, own.site):
        return replace(own, values=_copy(values, own.values), rounds=entry["rounds"])
    first, second = ([*errors] for errors in entry["errors"])
    found = State(values, entry["momentum"], (tuple(first), tuple(second)), own.sites, own.site, entry["rounds"])
    if [one.shape for one in found.tensors()] != [one.shape for one in own.tensors()]:
        raise ZgraphError(
            "zgraph.OuterSteps: the state has errors of another codec; load it with the codec that it was saved with."
        )
    values, momentum, *errors = (_copy(one, like) for one, like in zip(found.tensors(), own.tensors(), strict=True))
    return replace(
        found, values=values, momentum=momentum, errors=(tuple(errors[: len(first)]), tuple(errors[len(first) :]))
    )


def _copy(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.device, like.dtype, copy=True)
