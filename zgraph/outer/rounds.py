"""Rounds: in each, all sites exchange how far they have moved a fragment, and move its anchor alike.

The anchor a is a copy of the parameters with the same bits on all sites. In a round, with the values w_s of site s,

    all_to_all      each site sends a - w_s; a site receives its own rows from all sites
    mean            d = mean over sites, in the order of the sites
    outer step      u = momentum * u + d;  step = -lr * (d + momentum * u)      Nesterov; on the site's own rows
    all_gather      a = a + step, on all rows

With a codec, both exchanges send codes, and what a code loses is added to the next round (error feedback). The anchor
moves by decoded codes everywhere, also on the site that has sent them, so it stays equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.compressed_kernels import decode, encode
from zgraph.compression.methods import CompressionMethod
from zgraph.errors import ZgraphError
from zgraph.outer.fragments import Fragment
from zgraph.outer.sites import Sites

WEIGHT_BYTES = 8  # a float64 at the end of each row of the first exchange


@dataclass(frozen=True)
class OuterOptimizer:
    """Nesterov's method on anchors.

    Attributes:
        lr: learning rate.
        momentum: weight of the old momentum.
    """

    lr: float
    momentum: float

    def step(self, anchor: Tensor, mean: Tensor, momentum: Tensor) -> Tensor:
        """Return the next anchor; update the momentum in place.

        With lr=1 and momentum=0, the result has the bits of `mean`.

        Args:
            anchor: [rows].
            mean: [rows], mean over the sites' values.
            momentum: [rows].
        """
        momentum.mul_(self.momentum).add_(anchor - mean)
        return torch.lerp(anchor, mean, self.lr).sub_(momentum, alpha=self.lr * self.momentum)


class Anchor:
    """A fragment's anchor, and the state that its rounds keep.

    Args:
        fragment: the fragment.
        sites: exchanges with other sites.
        codec: compression of both exchanges; None: values are sent as they are.

    Attributes:
        fragment: the fragment.
        values: [numel], equal on all sites between rounds.
        momentum: [rows], of the rows that this site owns.
        errors: error feedback of the codes that this site sends in the first exchange, then in the second; empty
            without a codec.
        rounds: number of rounds so far.
    """

    def __init__(self, fragment: Fragment, sites: Sites, codec: CompressionMethod | None) -> None:
        self.fragment, self._sites = fragment, sites
        self._codec = codec if sites.count > 1 else None
        self._rows = -(-(fragment.numel // fragment.align) // sites.count) * fragment.align
        self.values = fragment.read()
        self.momentum = self.values.new_zeros(self._rows)
        self.errors: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.rounds = 0
        if self._codec is not None:
            self.errors = (self._no_errors(sites.count), self._no_errors(1))

    def _no_errors(self, chunks: int) -> list[Tensor]:
        assert self._codec is not None
        spec = self._codec.state(self._rows, chunks).values()
        return [torch.zeros(shape, dtype=dtype, device=self.values.device) for shape, dtype in spec]

    def state_dict(self) -> dict[str, Any]:
        """Return names of the parameters, and all that a round changes; tensors are not copied."""
        return {
            "parameters": list(self.fragment.names),
            "rounds": self.rounds,
            "values": self.values,
            "momentum": self.momentum,
            "errors": [list(errors) for errors in self.errors],
        }

    def check(self, state: Mapping[str, Any], *, same_sites: bool) -> None:
        """Check that `load_state_dict` can restore a state.

        Raises:
            ZgraphError: the state has other shards, or errors of another codec.
        """
        if state["values"].shape != self.values.shape:
            raise ZgraphError(
                f"zgraph.OuterSteps: the state has {state['values'].numel()} elements of {self.fragment.names[0]} and "
                f"the parameters of its fragment, this rank {self.values.numel()}; load it on as many ranks of a site, "
                "at the same stage."
            )
        if same_sites and [one.shape for one in _changing(state)] != [
            one.shape for one in _changing(self.state_dict())
        ]:
            raise ZgraphError(
                "zgraph.OuterSteps: the state has errors of another codec; load it with the codec that it was saved "
                "with."
            )

    def load_state_dict(self, state: Mapping[str, Any], *, same_sites: bool) -> None:
        """Restore a state.

        Args:
            state: result of `state_dict`.
            same_sites: whether the number of sites is the same; if not, only values are restored.
        """
        self.values = state["values"].to(self.values.device, copy=True)
        if same_sites:
            self.rounds = state["rounds"]
            for own, saved in zip(_changing(self.state_dict()), _changing(state), strict=True):
                own.copy_(saved)

    @property
    def kept_bytes(self) -> int:
        return self.values.nbytes + sum(one.nbytes for one in _changing(self.state_dict()))

    def run_round(self, sent: Tensor, weight: float, optimizer: OuterOptimizer) -> Tensor:
        """Run a round, which waits for the other sites, and return the new anchor, which replaces `values`.

        Args:
            sent: [numel], this site's values.
            weight: weight of this site in the mean.
            optimizer: the outer optimizer.
        """
        if self._codec is not None and self._codec.reset_interval and self.rounds % self._codec.reset_interval == 0:
            for error in (*self.errors[0], *self.errors[1]):
                error.zero_()
        mean = self._mean(sent, weight)
        own = self._own(self.values)
        target = optimizer.step(own, mean, self.momentum)
        if self._sites.count == 1:
            new = target
        elif self._codec is None:
            new = self._sites.all_gather(target).view(-1)[: self.fragment.numel]
        else:
            new = self.values + self._step_of_all(target - own)
        self.values, self.rounds = new, self.rounds + 1
        return new

    def _own(self, flat: Tensor) -> Tensor:
        """Return the rows that this site owns, padded with zeros."""
        return self._padded(flat).view(self._sites.count, self._rows)[self._sites.rank]

    def _padded(self, flat: Tensor) -> Tensor:
        return torch.nn.functional.pad(flat, (0, self._sites.count * self._rows - flat.numel()))

    def _mean(self, sent: Tensor, weight: float) -> Tensor:
        """Return the weighted mean of all sites' values, [rows] of this site."""
        count, own = self._sites.count, self._own(self.values)
        if count == 1:
            return sent
        if self._codec is None:
            payload = self._padded(sent).view(count, -1).view(torch.uint8)
        else:
            payload = self._encoded(self.values - sent, count, self.errors[0])
        weights = torch.full((count, 1), weight, dtype=torch.float64, device=payload.device).view(torch.uint8)
        received = self._sites.all_to_all(torch.cat([payload, weights], 1))
        weights = received[:, -WEIGHT_BYTES:].contiguous().view(torch.float64).flatten().tolist()
        content = received[:, :-WEIGHT_BYTES].contiguous()
        if self._codec is None:
            return _weighted_mean(content.view(sent.dtype), weights)
        return own - _weighted_mean(self._decoded(content), weights)

    def _step_of_all(self, step: Tensor) -> Tensor:
        """Send the outer step of this site's rows; return those of all sites, [numel], as all sites decode them."""
        received = self._sites.all_gather(self._encoded(step, 1, self.errors[1])[0])
        return self._decoded(received).view(-1)[: self.fragment.numel]

    def _encoded(self, flat: Tensor, world: int, errors: Sequence[Tensor]) -> Tensor:
        assert self._codec is not None
        return encode(flat, errors, self._codec, self._rows, world, self.rounds, self._sites.rank)

    def _decoded(self, received: Tensor) -> Tensor:
        """Decode rows of all sites: [sites, payload bytes] uint8 -> [sites, rows]."""
        assert self._codec is not None
        return decode(received, self._codec, self._rows, self.rounds)


def _changing(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a state that rounds change in place."""
    return [state["momentum"], *state["errors"][0], *state["errors"][1]]


def _weighted_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of [sites, n], summed in the order of the sites; equal weights count as 1."""
    weights = weights if len(set(weights)) > 1 else [1.0] * len(weights)
    total = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights, strict=True):
        total.add_(row, alpha=weight)
    return total / sum(weights)
