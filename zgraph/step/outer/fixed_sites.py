"""Sites whose ranks are all in one process group, from the first step to the last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zgraph.errors import ZgraphError
from zgraph.runtime.collective_error import collective_error
from zgraph.runtime.exchanges.changes import checksum
from zgraph.runtime.exchanges.collectives import all_gather, all_to_all
from zgraph.runtime.groups import group_rank, group_size
from zgraph.step.outer.rounds import Anchor, OuterOptimizer, State
from zgraph.step.outer.turns import Running, Timetable, Turn
from zgraph.torch_compat.groups import find_group, make_sibling_group, resolve_group

OF_ROUNDS = ".rounds"  # name suffix of groups with the same ranks, one for the rounds of each `OuterSteps`


class FixedSites:
    """Takes part in rounds with all other sites, at fixed steps; each rank with those at its position in other sites.

    It has the exchanges of `zgraph.step.outer.rounds.Links`. All members of the group create this object; if they
    create several, then in the same order.

    Args:
        group: the ranks at this rank's position in each site; None: a single site.

    Attributes:
        sent_bytes: bytes that this rank has sent to other sites in rounds.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.sent_bytes = 0
        self._group_name = ""
        if group is not None and group.size() > 1:
            # A group of its own, because rounds run while other groups are used for other things.
            names = (f"{group.group_name}{OF_ROUNDS}{number}" for number in itertools.count())
            self._group_name = next(name for name in names if find_group(name) is None)
            make_sibling_group(group, self._group_name)

    @property
    def overlaps(self) -> bool:
        """Whether rounds may take several steps: those of a single site end at once."""
        return self.count > 1

    def give(self, request: int, anchors: Sequence[Anchor]) -> None:
        raise AssertionError("all sites are there from the start")

    def check_finite(self, sent: Tensor, names: Sequence[str]) -> None:
        """Do nothing: rounds check the values of all sites."""

    def why_not(self) -> str:
        raise AssertionError("rounds fail with an error")

    @property
    def count(self) -> int:
        return group_size(self._group_name)

    @property
    def rank(self) -> int:
        return group_rank(self._group_name)

    def all_to_all(self, rows: Tensor) -> Tensor:
        self.sent_bytes += (self.count - 1) * rows[0].nbytes
        return all_to_all(rows, [1] * self.count, self._group_name)

    def all_gather(self, row: Tensor) -> Tensor:
        self.sent_bytes += (self.count - 1) * row.nbytes
        return all_gather(row[None], self.count, self._group_name)

    def join(self, described: Mapping[str, object], anchors: Sequence[Anchor]) -> None:
        """Check that sites have equal options and parameters, and let them start from the first site's values.

        Args:
            described: options, and layouts of parameters, by name.
            anchors: anchors, whose values may change.

        Raises:
            ZgraphError: on all ranks, if sites differ.
        """
        own = {name: repr(value) for name, value in described.items()}, [checksum([one.values]) for one in anchors]
        found: list[Any] = [own] * self.count
        if self.count == 1:
            return
        dist.all_gather_object(found, own, group=resolve_group(self._group_name))
        first, _ = found[0]
        for site, (other, _) in enumerate(found):
            if text := difference(first, other, f"on site {site}", "on site 0"):
                raise ZgraphError(text)
        for place, one in enumerate(anchors):
            if one.fragment.any_copy(len({digests[place] for _, digests in found}) > 1):
                values = one.values.clone()
                dist.broadcast(values, group=resolve_group(self._group_name), group_src=0)
                one.state = replace(one.state, values=values)
                one.fragment.write(values)

    def check_loaded(self, steps: int, states: Sequence[State]) -> None:
        """Check that all sites load states of the same step.

        Args:
            steps: number of steps so far.
            states: state of each anchor.

        Raises:
            ZgraphError: on all ranks, if they do not.
        """
        if self.count == 1:
            return
        own = steps, [one.rounds for one in states], [checksum([one.values]) for one in states]
        found: list[Any] = [own] * self.count
        dist.all_gather_object(found, own, group=resolve_group(self._group_name))
        for site, one in enumerate(found):
            if one != found[0]:
                raise ZgraphError(
                    f"zgraph.OuterSteps: site 0 loads a state of step {found[0][0]}, and site {site} one of step "
                    f"{one[0]} or of another run; load the checkpoints of the same step on all sites."
                )

    def turn(self, steps: int, running: Sequence[Running], table: Timetable) -> Turn:
        ending = [one for one in running if one.begun_at + table.delay <= steps]
        return Turn(ending, [(steps, place) for place in range(table.fragments) if table.begins(place, steps)], [])

    def last_turns(self, steps: int, table: Timetable) -> Iterator[tuple[int, int]]:
        return ((steps, place) for place in range(table.fragments))

    def run_round(
        self, anchor: Anchor, sent: Tensor, weight: float, optimizer: OuterOptimizer, number: int, place: int
    ) -> Tensor | None:
        """Run a round, and return the new values of the anchor.

        Args:
            number: number of steps so far.
            place: index of the fragment.

        Raises:
            CollectiveError: an exchange failed; the anchor is unchanged.
            ZgraphError: on all sites, if they run another round, or if one of them has values that are not finite.
        """
        try:
            if self.count > 1:
                self._check_round(anchor, sent, number, place)
            found = anchor.run_round(anchor.fetched(), sent, weight, optimizer, self, anchor.state.rounds)
            anchor.state = found
        except ZgraphError:
            raise
        except RuntimeError as error:
            names = anchor.fragment.names
            raise collective_error("zgraph.OuterSteps' round", names, self._group_name, error) from error
        return found.values

    def _check_round(self, anchor: Anchor, sent: Tensor, number: int, place: int) -> None:
        """Compare what sites are about to exchange; messages of unequal sizes would end the process."""
        own = torch.tensor([number, place, anchor.state.rounds, int(bool(sent.isfinite().all()))])
        found = all_gather(own[None], self.count, self._group_name).tolist()
        for site, one in enumerate(found):
            if one[:3] != found[0][:3]:
                raise ZgraphError(
                    f"zgraph.OuterSteps: site 0 exchanges fragment {found[0][1]} after {found[0][0]} steps, and site "
                    f"{site} fragment {one[1]} after {one[0]} steps. All sites call outer.step() equally often, then "
                    "outer.finish(); let a site without data go on with old batches and weight=0."
                )
        for site, one in enumerate(found):
            if not one[3]:
                names = ", ".join(anchor.fragment.names[:4])
                raise ZgraphError(
                    f"zgraph.OuterSteps: site {site} has values that are not finite among {names} and others of their "
                    "fragment; anchors have not changed. Restore its parameters, for example from outer.anchor()."
                )


def difference(first: Mapping[str, str], other: Mapping[str, str], where: str, where_first: str) -> str:
    """Return an error text that names the first option or parameter in which two sites differ; "" if they do not."""
    name = next((name for name in {**first, **other} if first.get(name) != other.get(name)), None)
    if name is None:
        return ""
    return (
        f"zgraph.OuterSteps: {name} is {other.get(name, 'missing')} {where}, and {first.get(name, 'missing')} "
        f"{where_first}; give all sites equal options, and models sharded alike."
    )
