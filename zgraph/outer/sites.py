"""The exchanges of one rank with the ranks at its position in other sites."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zgraph.runtime.exchanges.collectives import all_gather, all_to_all
from zgraph.runtime.groups import group_rank, group_size
from zgraph.torch_compat.groups import find_group, make_sibling_group, resolve_group

OF_ROUNDS = ".rounds"  # name suffix of groups with the same ranks, one for the rounds of each `OuterSteps`


@dataclass
class Sites:
    """The sites, as this rank sees them.

    Attributes:
        group_name: name of the process group of the ranks at this rank's position in each site; "" for a single site.
        sent_bytes: bytes that this rank has sent to other sites in rounds.
    """

    group_name: str = ""
    sent_bytes: int = 0

    @classmethod
    def of(cls, group: ProcessGroup | None) -> Sites:
        """Create a new group with the same ranks, because rounds run while other groups are used for other things.

        All members call this, in the same order if they do so several times.
        """
        if group is None or group.size() == 1:
            return cls()
        names = (f"{group.group_name}{OF_ROUNDS}{number}" for number in itertools.count())
        name = next(name for name in names if find_group(name) is None)
        make_sibling_group(group, name)
        return cls(name)

    @property
    def count(self) -> int:
        return group_size(self.group_name)

    @property
    def rank(self) -> int:
        """Number of this rank's site."""
        return group_rank(self.group_name)

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row i to site i; return the rows that all sites have sent here, [sites, n]."""
        self.sent_bytes += (self.count - 1) * rows[0].nbytes
        return all_to_all(rows, [1] * self.count, self.group_name)

    def all_gather(self, row: Tensor) -> Tensor:
        """Send a row to all sites; return the rows of all sites: [n] -> [sites, n]."""
        self.sent_bytes += (self.count - 1) * row.nbytes
        return all_gather(row[None], self.count, self.group_name)

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all sites; they must be picklable."""
        found = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(found, value, group=resolve_group(self.group_name))
        return found

    def take_from_first(self, flat: Tensor) -> None:
        """Overwrite a tensor with that of the first site."""
        if self.count > 1:
            dist.broadcast(flat, group=resolve_group(self.group_name), group_src=0)
