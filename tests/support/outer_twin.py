"""`zgraph.OuterSteps` in plain PyTorch, with all sites in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from zgraph.codegen.kernels.reference import dequantize_each_bucket, quantize_bucket
from zgraph.compression.methods import BlockMethod, RngKey
from zgraph.compression.payload import BucketLayout


class Options(NamedTuple):
    """Options of `OuterSteps`; `fragments` has the positions of each fragment's parameters."""

    fragments: Sequence[Sequence[int]]
    every: int = 4
    lr: float = 0.7
    momentum: float = 0.5
    codec: BlockMethod | None = None
    delay: int = 1


class Twin:
    """A model for each site, of which each of `dp` ranks exchanges its rows, or its slice at stage 0."""

    def __init__(self, model: nn.Module, sites: int, dp: int, stage: int, options: Options) -> None:
        self.models = [copy.deepcopy(model) for _ in range(sites)]
        self.dp, self.stage, self.options, self.steps = dp, stage, options, 0
        self.align = 1 if options.codec is None else options.codec.group
        self.places = [(f, d) for f in range(len(options.fragments)) for d in range(dp)]
        self.anchors = {place: self.read(0, place) for place in self.places}
        self.moments = {place: torch.zeros(()) for place in self.places}
        self.errors: dict[tuple[object, ...], dict[str, Tensor]] = {}
        self.rounds = dict.fromkeys(self.places, 0)
        self.flying: list[tuple[int, tuple[int, int], list[Tensor], Tensor]] = []

    def parts(self, site: int, place: tuple[int, int]) -> list[tuple[Tensor, int]]:
        """A rank's view of each parameter, and its length with padding; slices of replicated parameters come first."""
        parameters = [[*self.models[site].parameters()][index].data for index in self.options.fragments[place[0]]]
        found: list[tuple[bool, Tensor, int]] = []
        for one in parameters:
            split = self.stage > 0 and one.ndim > 0
            share = -(-one.shape[0] // self.dp) * one[0].numel() if split else -(-one.numel() // self.dp)
            view = one.view(-1)[place[1] * share : (place[1] + 1) * share]
            found.append((split, view, -(-(view.numel() if split else share) // self.align) * self.align))
        found.sort(key=lambda part: part[0] and self.dp > 1)
        return [(view, length) for _, view, length in found]

    def read(self, site: int, place: tuple[int, int]) -> Tensor:
        return torch.cat([pad(view.float(), (0, length - view.numel())) for view, length in self.parts(site, place)])

    def coded(self, flat: Tensor, world: int, place: tuple[int, int], site: int) -> Tensor:
        """[world * rows] as other sites decode a site's codes for it; the error is added to the next ones."""
        codec, draw, rows = self.options.codec, RngKey(self.rounds[place]), flat.numel() // world
        assert codec is not None
        layout, one = BucketLayout(codec, (rows,), world), BucketLayout(codec, (rows,), 1)
        spec = codec.state(rows, world).items()
        fresh = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec}
        payload = torch.zeros(world, layout.payload_bytes, dtype=torch.uint8)
        quantize_bucket([flat], [self.errors.setdefault((*place, site, world), fresh)], layout, draw, site, payload)
        decoded = torch.empty(world, site + 1, rows)
        for row, found in zip(payload, decoded, strict=True):
            dequantize_each_bucket(row.repeat(site + 1, 1), one, draw, [found])
        return decoded[:, site].flatten()

    @torch.no_grad()
    def begin(self, place: tuple[int, int], delay: int) -> None:
        options, anchor, sites = self.options, self.anchors[place], range(len(self.models))
        rows = -(-(anchor.numel() // self.align) // len(sites)) * self.align
        sent = [self.read(site, place) for site in sites]
        old, *given = [pad(one, (0, len(sites) * rows - one.numel())) for one in (anchor, *sent)]
        is_coded = options.codec is not None and len(sites) > 1
        if is_coded:
            given = [old - self.coded(old - given[site], len(sites), place, site) for site in sites]
        mean = sum(given) / len(sites)
        moment = self.moments[place] = options.momentum * self.moments[place] + (old - mean)
        new = torch.lerp(old, mean, options.lr).sub(moment, alpha=options.lr * options.momentum)
        if is_coded:
            steps = zip((new - old).split(rows), sites, strict=True)
            new = old + torch.cat([self.coded(step, 1, place, site) for step, site in steps])
        self.anchors[place], self.rounds[place] = new[: anchor.numel()], self.rounds[place] + 1
        self.flying.append((self.steps + delay, place, sent, self.anchors[place]))
        if not delay:
            self.end(*self.flying.pop()[1:], overlaps=False)

    def end(self, place: tuple[int, int], sent: Sequence[Tensor], new: Tensor, *, overlaps: bool = True) -> None:
        for site, one in enumerate(sent):
            values = self.read(site, place) + (new - one) if overlaps else new
            for view, length in self.parts(site, place):
                value, values = values[:length], values[length:]
                view.copy_(value[: view.numel()])

    def step(self) -> None:
        self.steps += 1
        for one in [one for one in self.flying if one[0] <= self.steps]:
            self.flying.remove(one)
            self.end(*one[1:])
        for place in self.places:
            since = self.steps - place[0] * self.options.every // len(self.options.fragments)
            if since > 0 and since % self.options.every == 0:
                self.begin(place, self.options.delay)

    def finish(self) -> None:
        for _ in range(len(self.flying)):
            self.end(*self.flying.pop(0)[1:])
        for place in self.places:
            self.begin(place, 0)
