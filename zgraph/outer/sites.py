"""The exchanges of one rank with the ranks at its position in other sites."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from zgraph.runtime.exchanges.collectives import all_gather, all_to_all
from zgraph.runtime.groups import group_rank, group_size
from zgraph.torch_compat.groups import find_group, make_sibling_group

OF_ROUNDS = ".rounds"  # name suffix of a group with the same ranks, for the exchanges of rounds


@dataclass(frozen=True)
class Sites:
    """The sites, as this rank sees them.

    Attributes:
        group_name: name of the process group of the ranks at this rank's position in each site; "" for a single site.
    """

    group_name: str = ""

    @classmethod
    def of(cls, group: ProcessGroup | None) -> Sites:
        """Create a group with the same ranks, because rounds run while the caller's group may be used otherwise.

        All members call this.
        """
        if group is None or group.size() == 1:
            return cls()
        name = group.group_name + OF_ROUNDS
        if find_group(name) is None:
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
        return all_to_all(rows, [1] * self.count, self.group_name) if self.count > 1 else rows

    def all_gather(self, row: Tensor) -> Tensor:
        """Send a row to all sites; return the rows of all sites: [n] -> [sites, n]."""
        return all_gather(row[None], self.count, self.group_name) if self.count > 1 else row[None]
