"""Identity of exchanges: a tag, computed from a collective's parameters, that keeps other collectives from matching it.

Gathers of two parameters of the same shape look alike on the wire. If ranks make different calls (layers dropped at
random, experts without tokens, an evaluation on one rank), two unrelated gathers meet and mix their data. So each
exchange between pairs of ranks has a unique tag, computed from

- the model's number from `zgraph.shard`, and the number of its exchanges so far;
- the names of the parameters, and the bytes of the message;
- the training loop's writes to weights (`zgraph.runtime.exchanges.changes`).

Exchanges with different tags never meet: both wait, until `zgraph.runtime.exchanges.watch` finds the mismatch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__

from zgraph.runtime.exchanges.changes import Changes
from zgraph.runtime.handle import name_of
from zgraph.torch_compat.groups import default_store, is_fake_world

_IDENTITY = "zgraph_identity"  # attribute of a handle
_FIRST_TAG = 1 << 30  # far from tags that users choose; gloo's are positive 32-bit integers
_BITS, _PLACES = 24, 64  # bits of a tag that hold the hash, and number of values of the place: see `tag_of`

Options = tuple[tuple[str, Any], ...]  # names and values of optimizer options, equal on all ranks


@dataclass(eq=False)
class Exchanges:
    """Count of the exchanges of one model, that is, of all parameters sharded by one call of `zgraph.shard`.

    Attributes:
        group_name: name of the model's process group.
        store: torch.distributed's rendezvous store, which gave the model its number.
        model: number of the model among the group's models; equal on all ranks, as all shard models in the same order.
        failures: how often ranks have found that their exchanges differ; the ranks involved then restart the count.
        count: exchanges since the last restart.
        changes: record of the loop's changes to weights and gradients since the last step.
    """

    group_name: str
    store: Store
    model: int
    failures: int = 0
    count: int = 0
    changes: Changes = field(default_factory=Changes)

    @classmethod
    def of(cls, group_name: str) -> Exchanges | None:
        """Start the count of a new model, numbered by the store; return None in a fake world, where nothing is sent."""
        if is_fake_world():
            return None
        store = default_store()
        return cls(group_name, store, store.add(f"zgraph/models/{group_name}/{dist.get_rank()}", 1))

    def __deepcopy__(self, memo: dict[int, object]) -> Exchanges | None:
        return cast("Exchanges | None", memo.setdefault(id(self), Exchanges.of(self.group_name)))  # a model of its own

    def next(self, number: int = 0) -> int:
        """Count one exchange, and return its key: a hash of integers, which is the same in each process.

        Args:
            number: hash of the parameter's name or of options; 0 if there is neither.
        """
        self.count += 1
        return hash((self.model, self.failures, self.count, number, self.changes.pending))

    def end_of_step(self, options: Options, number: int = 0, changes: int = 0, text: str = "") -> About:
        """Identity of the exchange that ends a step. It matches only if all ranks have counted equally many exchanges.

        Args:
            options: (name, value) of the optimizer's numeric options, the same on all ranks.
            number: hash of the optimizer's other inputs.
            changes: hash of the loop's changes to weights and gradients; 0 if there are none.
            text: description of the changes, for the error.
        """
        key = self.next(hash((_number_of(options), number, changes)))
        found = About(key, f"optimizer.step(){text}", (), self, options)
        return found

    def meeting(self, call: str, options: Options = (), number: int = 0, detail: str = "") -> About:
        """Identity of the exchange with which all ranks begin a call that is not about parameters; see `Model.meet`."""
        key = self.next(hash((zlib.crc32(call.encode()), _number_of(options), number)))
        return About(key, call + detail, (), self, options)

    @property
    def began(self) -> list[Any]:
        """The arguments with which a peer calls `began_anew`: group, model number, and restarts of this count."""
        return [self.group_name, self.model, self.failures]

    def began_anew(self, group_name: str, model: int, failures: int) -> bool:
        """Whether this count has been restarted more often than a peer's count of the same model."""
        return (self.group_name, self.model) == (group_name, model) and self.failures > failures

    def restart(self) -> None:
        """Restart the count after ranks have failed to agree, so that a loop that catches the error can go on."""
        self.failures, self.count = self.failures + 1, 0
        self.changes.begin_anew(self.failures)


class About(NamedTuple):
    """Identity of an exchange.

    Attributes:
        key: hash that is equal on all participating ranks, and differs from that of any other exchange.
        kind: description of the operation, for errors.
        handles: handles of the parameters whose data is exchanged.
        exchanges: exchange count of the model, which includes this exchange.
        options: (name, value) of options that ranks must agree on.
    """

    key: int
    kind: str
    handles: tuple[Tensor, ...]
    exchanges: Exchanges
    options: Options = ()

    def __str__(self) -> str:
        names = [name_of(handle) for handle in self.handles]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        options = ", ".join(f"{name}={value}" for name, value in self.options if value is not False)
        parameters = f" of {', '.join(names[:4])}{more}" if names else ""
        changes = self.exchanges.changes
        written = f" after {changes.last}" if changes.pending and changes.last and names else ""
        return f"{self.kind}{parameters}{f' with {options}' if options else ''}{written}"


@dataclass(frozen=True)
class Identity:
    """Identity of a handle's parameter: the exchange count of its model, and a checksum of its name."""

    exchanges: Exchanges
    number: int


def identify(handle: Tensor, exchanges: Exchanges | None) -> None:
    """Attach a parameter's identity to its handle; do nothing if exchanges are not counted (None)."""
    if exchanges is not None:
        setattr(handle, _IDENTITY, Identity(exchanges, zlib.crc32(name_of(handle).encode())))


def about(kind: str, handle: Tensor) -> About | None:
    """Count one exchange for one parameter, and return its identity; None if exchanges are not counted."""
    found: Identity | None = getattr(handle, _IDENTITY, None)
    if found is None:
        return None
    return About(found.exchanges.next(hash((found.number, _number_of_kind(kind)))), kind, (handle,), found.exchanges)


def exchanges_of(handles: Sequence[Tensor]) -> Exchanges | None:
    """The exchange count of the model to which the first handle belongs; None if exchanges are not counted."""
    found: Identity | None = getattr(handles[0], _IDENTITY, None) if handles else None
    return None if found is None else found.exchanges


class CalledFor:
    """The parameters for which a compiled program is being called: equal blocks of a model share one program.

    The program sets the parameters' handles when a call begins, and drops them when the call ends. Dynamo keeps
    programs longer than models live, and a handle keeps its model alive.
    """

    def __init__(self) -> None:
        self._handles: Mapping[str, Tensor] = {}
        self._numbers: dict[str, int] = {}
        self._exchanges: Exchanges | None = None
        self._key = 0
        self._options: Options = ()

    def begin(self, handles: Mapping[str, Tensor], options: Options = ()) -> None:
        """Begin a call with these handles, by the names of their placeholders, and with options of optimizers."""
        pairs = ((name, getattr(handle, _IDENTITY, None)) for name, handle in handles.items())
        found: dict[str, Identity] = {name: one for name, one in pairs if one is not None}
        self._handles, self._numbers = handles, {name: one.number for name, one in found.items()}
        self._exchanges = next((one.exchanges for one in found.values()), None)
        if self._exchanges is not None:
            self._key, self._options = self._exchanges.next(_number_of(options)), options

    def end(self) -> None:
        """End the call; exchanges that the call has started keep their identity."""
        self._handles, self._numbers, self._exchanges = {}, {}, None

    def about(self, kind: str, names: Sequence[str]) -> About | None:
        """Identity of an exchange for the parameters of placeholders `names`; None if exchanges are not counted."""
        if self._exchanges is None:
            return None
        known = [name for name in names if name in self._numbers]
        key = hash((self._key, _number_of_kind(kind), *map(self._numbers.__getitem__, known)))
        return About(key, kind, tuple(map(self._handles.__getitem__, known)), self._exchanges, self._options)


@cache
def _number_of_kind(kind: str) -> int:
    """Checksum of the kind of a collective, which tells a gather from a reduction of the same parameter and size."""
    return zlib.crc32(kind.encode())


def _number_of(options: Options) -> int:
    """Hash of the options' values, without their names: the hash of a string differs between processes."""
    return hash(tuple(value if value == value else 0.5 for _, value in options))  # NaN's hash depends on the object


def tag_of(key: int, place: int, nbytes: int) -> int:
    """Tag of one message of an exchange.

    Args:
        key: key of the exchange, see `About.key`.
        place: number of the exchange in its graph; the tag keeps it, because gloo chooses a network interface by tag.
        nbytes: size of the message; if messages of different sizes met, gloo would end the process.
    """
    return _FIRST_TAG | (hash((key, place, nbytes)) % (1 << _BITS)) * _PLACES | place % _PLACES
