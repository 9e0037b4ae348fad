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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from zgraph.codegen.compressed_kernels import decode, encode
from zgraph.compression.methods import CompressionMethod
from zgraph.step.outer.fragments import Fragment

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

    def step(self, anchor: Tensor, mean: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next anchor, and the next momentum.

        With lr=1 and momentum=0, the result has the bits of `mean`.

        Args:
            anchor: [rows].
            mean: [rows], mean over the sites' values.
            momentum: [rows].
        """
        momentum = (momentum * self.momentum).add_(anchor - mean)
        return torch.lerp(anchor, mean, self.lr).sub_(momentum, alpha=self.lr * self.momentum), momentum


class Links(Protocol):
    """Exchanges of this rank with the ranks at its position in the other sites of a round.

    Attributes:
        count: number of sites.
        rank: number of this site among them.
    """

    @property
    def count(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row i to site i; return the rows that all sites have sent here, [sites, n]."""
        ...

    def all_gather(self, row: Tensor) -> Tensor:
        """Send a row to all sites; return the rows of all sites: [n] -> [sites, n]."""
        ...


@dataclass(frozen=True)
class State:
    """What rounds keep of a fragment. A round returns a new state, so that one that fails changes nothing.

    Attributes:
        values: the anchor, [numel], equal on all sites between rounds.
        momentum: [rows], of the rows that this site owns.
        errors: error feedback of the codes that this site sends in the first exchange, then in the second; empty
            without a codec.
        sites: number of sites among which rows are divided.
        site: number of this site among them.
        rounds: number of rounds so far.
    """

    values: Tensor
    momentum: Tensor
    errors: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), ())
    sites: int = 1
    site: int = 0
    rounds: int = 0

    def tensors(self) -> list[Tensor]:
        return [self.values, self.momentum, *self.errors[0], *self.errors[1]]

    def moved(self, move: Callable[[Tensor], Tensor]) -> State:
        """Return the state with `move` applied to each tensor."""
        first, second = (tuple(map(move, errors)) for errors in self.errors)
        return replace(self, values=move(self.values), momentum=move(self.momentum), errors=(first, second))


class Anchor:
    """A fragment with the state of its rounds.

    Args:
        fragment: the fragment.
        codec: compression of both exchanges; None: values are sent as they are.
        sites, site: number of sites, and of this one among them.

    Attributes:
        fragment: the fragment.
    """

    def __init__(self, fragment: Fragment, codec: CompressionMethod | None, sites: int = 1, site: int = 0) -> None:
        self.fragment, self._codec = fragment, codec
        values = fragment.read()
        self.state = self.divided(State(values, values), sites, site)

    @property
    def state(self) -> State:
        """The state after the last round, with tensors in the tier of optimizer state."""
        return self._state

    @state.setter
    def state(self, new: State) -> None:
        self._state = new.moved(self.fragment.at_rest)

    def fetched(self) -> State:
        """Return the state with tensors on the device."""
        return self._state.moved(self.fragment.fetched)

    @property
    def values(self) -> Tensor:
        """The anchor, on the device."""
        return self.fragment.fetched(self._state.values)

    @property
    def kept_bytes(self) -> int:
        return sum(one.nbytes for one in self.state.tensors())

    def rows(self, sites: int) -> int:
        """Return the number of rows that each site owns."""
        return -(-(self.fragment.numel // self.fragment.align) // sites) * self.fragment.align

    def divided(self, state: State, sites: int, site: int) -> State:
        """Return a state for other sites; momentum and errors are zeros."""
        rows, codec = self.rows(sites), self._codec if sites > 1 else None

        def errors(chunks: int) -> tuple[Tensor, ...]:
            spec = () if codec is None else codec.state(rows, chunks).values()
            return tuple(torch.zeros(shape, dtype=dtype, device=state.values.device) for shape, dtype in spec)

        return replace(
            state, momentum=state.values.new_zeros(rows), errors=(errors(sites), errors(1)), sites=sites, site=site
        )

    def run_round(
        self, state: State, sent: Tensor, weight: float, optimizer: OuterOptimizer, links: Links, number: int
    ) -> State:
        """Run a round, which waits for the other sites; return the next state.

        Args:
            state: a state for the sites of `links`, with tensors on the device.
            sent: [numel], this site's values.
            weight: weight of this site in the mean.
            optimizer: the outer optimizer.
            links: exchanges with the other sites.
            number: number of the round, equal on all sites.
        """
        codec = self._codec if links.count > 1 else None
        errors = tuple(tuple(error.clone() for error in of_exchange) for of_exchange in state.errors)
        if codec is not None and codec.reset_interval and number % codec.reset_interval == 0:
            for error in (*errors[0], *errors[1]):
                error.zero_()
        coder = None if codec is None else _Coder(codec, self.rows(links.count), links, number)
        mean, own = self._mean(state, sent, weight, errors[0], coder, links), self._own(state.values, links)
        target, momentum = optimizer.step(own, mean, state.momentum)
        if links.count == 1:
            values = target
        elif coder is None:
            values = links.all_gather(target).view(-1)[: sent.numel()]
        else:
            received = links.all_gather(coder.encoded(target - own, 1, errors[1])[0])
            values = state.values + coder.decoded(received).view(-1)[: sent.numel()]
        return replace(state, values=values, momentum=momentum, errors=(errors[0], errors[1]), rounds=state.rounds + 1)

    def _own(self, flat: Tensor, links: Links) -> Tensor:
        """Return the rows that this site owns, padded with zeros."""
        rows = self.rows(links.count)
        return _padded(flat[links.rank * rows : (links.rank + 1) * rows], rows)

    def _mean(
        self, state: State, sent: Tensor, weight: float, errors: Sequence[Tensor], coder: _Coder | None, links: Links
    ) -> Tensor:
        """Return the weighted mean of all sites' values, [rows] of this site."""
        if links.count == 1:
            return sent
        if coder is None:
            rows = self.rows(links.count)
            payload = _padded(sent, links.count * rows).view(links.count, rows).view(torch.uint8)
        else:
            payload = coder.encoded(state.values - sent, links.count, errors)
        weights = torch.full((links.count, 1), weight, dtype=torch.float64, device=payload.device).view(torch.uint8)
        received = links.all_to_all(torch.cat([payload, weights], 1))
        weights = received[:, -WEIGHT_BYTES:].contiguous().view(torch.float64).flatten().tolist()
        content = received[:, :-WEIGHT_BYTES].contiguous()
        if coder is None:
            return _weighted_mean(content.view(sent.dtype), weights)
        return self._own(state.values, links) - _weighted_mean(coder.decoded(content), weights)


@dataclass(frozen=True)
class _Coder:
    """Codes of one round."""

    codec: CompressionMethod
    rows: int
    links: Links
    number: int

    def encoded(self, flat: Tensor, world: int, errors: Sequence[Tensor]) -> Tensor:
        return encode(flat, errors, self.codec, self.rows, world, self.number, self.links.rank)

    def decoded(self, received: Tensor) -> Tensor:
        """Decode rows of all sites: [sites, payload bytes] uint8 -> [sites, rows]."""
        return decode(received, self.codec, self.rows, self.number)


def _weighted_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of [sites, n], summed in the order of the sites; equal weights count as 1."""
    weights = weights if len(set(weights)) > 1 else [1.0] * len(weights)
    total = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.add_(row, alpha=weight)
    return total.div_(sum(weights))


def _padded(flat: Tensor, numel: int) -> Tensor:
    """Append zeros up to `numel` elements; returns `flat` itself if none are missing."""
    missing = numel - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
