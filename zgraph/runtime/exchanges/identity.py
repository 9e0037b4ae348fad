"""Identity of exchanges: which parameters a collective is for, so that it never meets another one.

A gather of one parameter and a gather of another of the same shape look alike on the wire. Where ranks differ in what
they call (layers dropped at random, experts without tokens, an evaluation on one rank), the wrong two would meet and
mix their data. So each exchange between pairs of ranks has a tag of its own, computed from

- the model, as `zgraph.shard` has numbered it, and how many exchanges it has had;
- the names of the parameters, and the bytes of the message;
- what lines of the loop have written to weights (`zgraph.runtime.exchanges.changes`).

Exchanges of different tags never meet: they wait, and `zgraph.runtime.exchanges.watch` finds out.
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
_BITS, _PLACES = 24, 64  # bits of a hash; and values of the rest, which is the place: see `tag_of`

Options = tuple[tuple[str, Any], ...]  # names and values, by which all ranks step


@dataclass(eq=False)
class Exchanges:
    """The count of the exchanges of what one call of `zgraph.shard` has sharded.

    Attributes:
        group_name: name of its process group.
        store: the rendezvous store, which has counted the model.
        model: number of the call among those on that group; equal on all ranks, which shard in one order.
        failures: how often ranks have found that they do not exchange the same; all that do begin to count anew.
        count: exchanges since.
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
        """Those of a new model; None in a world in which nothing is sent. The store counts each rank's models."""
        if is_fake_world():
            return None
        store = default_store()
        return cls(group_name, store, store.add(f"zgraph/models/{group_name}/{dist.get_rank()}", 1))

    def __deepcopy__(self, memo: dict[int, object]) -> Exchanges | None:
        return cast("Exchanges | None", memo.setdefault(id(self), Exchanges.of(self.group_name)))  # a model of its own

    def next(self, number: int = 0) -> int:
        """Key of the next exchange, a hash of integers, which is the same in each process.

        Args:
            number: hash of the parameter's name or of options; 0 for neither.
        """
        self.count += 1
        return hash((self.model, self.failures, self.count, number, self.changes.pending))

    def end_of_step(self, options: Options, number: int = 0, changes: int = 0, text: str = "") -> About:
        """The exchange that ends a step: every rank must have had the same number of exchanges in it.

        Args:
            options: (name, value) of numbers by which the optimizer steps, the same on all ranks.
            number: hash of what else the optimizer steps by.
            changes: hash of what the loop has done to weights and gradients; 0: nothing.
            text: describes the changes in the error.
        """
        key = self.next(hash((_number_of(options), number, changes)))
        found = About(key, f"optimizer.step(){text}", (), self, options)
        return found

    def meeting(self, call: str, options: Options = (), number: int = 0, detail: str = "") -> About:
        """The exchange with which all ranks begin a call that is not one of parameters; see `Model.meet`."""
        key = self.next(hash((zlib.crc32(call.encode()), _number_of(options), number)))
        return About(key, call + detail, (), self, options)

    @property
    def began(self) -> list[Any]:
        """Which model's count this is, and how often it has begun anew."""
        return [self.group_name, self.model, self.failures]

    def began_anew(self, group_name: str, model: int, failures: int) -> bool:
        """Whether this count has begun anew since a peer's of the same model."""
        return (self.group_name, self.model) == (group_name, model) and self.failures > failures

    def restart(self) -> None:
        """Begin anew after ranks have failed to agree, so that a loop which catches the error can go on."""
        self.failures, self.count = self.failures + 1, 0
        self.changes.begin_anew(self.failures)


class About(NamedTuple):
    """Which exchange this is.

    Attributes:
        key: equal on all ranks that take part, and different from that of any other exchange.
        kind: what is done, for people.
        handles: handles of the parameters it is for.
        exchanges: of the model that has counted it.
        options: (name, value) of what else ranks must agree on.
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
    """Which parameter a handle stands for: the count of its model's exchanges, and a number of its name."""

    exchanges: Exchanges
    number: int


def identify(handle: Tensor, exchanges: Exchanges | None) -> None:
    """Give a handle its identity; None: nobody counts exchanges."""
    if exchanges is not None:
        setattr(handle, _IDENTITY, Identity(exchanges, zlib.crc32(name_of(handle).encode())))


def about(kind: str, handle: Tensor) -> About | None:
    """The next exchange for one parameter; None where nobody counts exchanges."""
    found: Identity | None = getattr(handle, _IDENTITY, None)
    if found is None:
        return None
    return About(found.exchanges.next(hash((found.number, _number_of_kind(kind)))), kind, (handle,), found.exchanges)


def exchanges_of(handles: Sequence[Tensor]) -> Exchanges | None:
    """The count of the model to which the first of some handles belongs."""
    found: Identity | None = getattr(handles[0], _IDENTITY, None) if handles else None
    return None if found is None else found.exchanges


class CalledFor:
    """The parameters that a compiled graph is called for: equal blocks share it, and only handles tell them apart.

    One for each program, which says at the beginning of a call which handles it was given, and lets go of them when it
    ends: Dynamo keeps programs longer than models live, and a handle keeps its model.
    """

    def __init__(self) -> None:
        self._handles: Mapping[str, Tensor] = {}
        self._numbers: dict[str, int] = {}
        self._exchanges: Exchanges | None = None
        self._key = 0
        self._options: Options = ()

    def begin(self, handles: Mapping[str, Tensor], options: Options = ()) -> None:
        """A call begins, with these handles and options of optimizers by the names of their placeholders."""
        pairs = ((name, getattr(handle, _IDENTITY, None)) for name, handle in handles.items())
        found: dict[str, Identity] = {name: one for name, one in pairs if one is not None}
        self._handles, self._numbers = handles, {name: one.number for name, one in found.items()}
        self._exchanges = next((one.exchanges for one in found.values()), None)
        if self._exchanges is not None:
            self._key, self._options = self._exchanges.next(_number_of(options)), options

    def end(self) -> None:
        """The call has ended; what it has started knows by itself which exchange it is."""
        self._handles, self._numbers, self._exchanges = {}, {}, None

    def about(self, kind: str, names: Sequence[str]) -> About | None:
        """An exchange of this call, for the parameters of these placeholders; None where nobody counts exchanges."""
        if self._exchanges is None:
            return None
        known = [name for name in names if name in self._numbers]
        key = hash((self._key, _number_of_kind(kind), *map(self._numbers.__getitem__, known)))
        return About(key, kind, tuple(map(self._handles.__getitem__, known)), self._exchanges, self._options)


@cache
def _number_of_kind(kind: str) -> int:
    """A gather and a reduction of one parameter may have equal bytes and places, in groups of the same ranks."""
    return zlib.crc32(kind.encode())


def _number_of(options: Options) -> int:
    """The same in each process, which the hash of a name is not."""
    return hash(tuple(value if value == value else 0.5 for _, value in options))  # a NaN's is that of the object


def tag_of(key: int, place: int, nbytes: int) -> int:
    """Tag of a message of an exchange.

    Args:
        key: of the exchange, or of the call of the graph that it is in.
        place: number of the exchange in its graph. Given several interfaces, gloo chooses one by the tag.
        nbytes: size of the message. Messages of different sizes never meet either: gloo would end the process.
    """
    return _FIRST_TAG | (hash((key, place, nbytes)) % (1 << _BITS)) * _PLACES | place % _PLACES
