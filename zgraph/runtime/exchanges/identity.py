"""Identities of exchanges: message tags by which a collective matches only the same collective of other ranks.

An exchange is a collective between ranks. If ranks make different calls (layers dropped at random, experts without
tokens, an evaluation on one rank), gathers of two parameters with equal shapes could match and mix their data. So the
tag of each point-to-point message is a hash of

- the number that `zgraph.shard` gave the model, and the number of the model's exchanges so far;
- the names of the parameters, and the size of the message;
- the training loop's writes to weights (`zgraph.runtime.exchanges.changes`).

Exchanges with different tags never match: their ranks wait until `zgraph.runtime.exchanges.watch` finds the mismatch.
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
    """Counter of the exchanges of one model.

    An exchange is a collective between ranks; a model is the parameters sharded by one call of `zgraph.shard`.

    Attributes:
        group_name: name of the model's process group.
        store: torch.distributed's rendezvous store, from which the model got its number.
        model: number of the model among the group's models; equal on all ranks that shard models in the same order.
        failures: number of mismatches so far; each resets the count of the ranks involved.
        count: number of exchanges since the last reset.
        changes: record of the training loop's changes to weights and gradients since the last step.
    """

    group_name: str
    store: Store
    model: int
    failures: int = 0
    count: int = 0
    changes: Changes = field(default_factory=Changes)

    @classmethod
    def of(cls, group_name: str) -> Exchanges | None:
        """Create the counter for a new model, numbered by the store; None in a fake world, where nothing is sent."""
        if is_fake_world():
            return None
        store = default_store()
        return cls(group_name, store, store.add(f"zgraph/models/{group_name}/{dist.get_rank()}", 1))

    def __deepcopy__(self, memo: dict[int, object]) -> Exchanges | None:
        return cast("Exchanges | None", memo.setdefault(id(self), Exchanges.of(self.group_name)))  # a new model

    def next(self, number: int = 0) -> int:
        """Count one exchange and return its key, a hash that is equal in all processes.

        Args:
            number: hash of parameter names or options, which becomes part of the key; 0 if there are none.
        """
        self.count += 1
        return hash((self.model, self.failures, self.count, number, self.changes.pending))

    def end_of_step(self, options: Options, number: int = 0, changes: int = 0, text: str = "") -> About:
        """Return the identity of the exchange that ends a step; ranks with different numbers of exchanges do not match.

        Args:
            options: (name, value) of the optimizer's numeric options.
            number: hash of the optimizer's other inputs.
            changes: hash of the training loop's changes to weights and gradients; 0 if there are none.
            text: description of the changes, for error messages.
        """
        key = self.next(hash((_number_of(options), number, changes)))
        found = About(key, f"optimizer.step(){text}", (), self, options)
        return found

    def meeting(self, call: str, options: Options = (), number: int = 0, detail: str = "") -> About:
        """Return the identity of an exchange that carries no parameter data, but compares calls: see `Model.meet`."""
        key = self.next(hash((zlib.crc32(call.encode()), _number_of(options), number)))
        return About(key, call + detail, (), self, options)

    @property
    def began(self) -> list[Any]:
        """[group name, model number, number of resets]; a peer passes these values to its own `began_anew`."""
        return [self.group_name, self.model, self.failures]

    def began_anew(self, group_name: str, model: int, failures: int) -> bool:
        """Return whether this rank has reset its counter of a model more often than a peer has.

        Args:
            group_name, model, failures: the peer's `began`.
        """
        return (self.group_name, self.model) == (group_name, model) and self.failures > failures

    def restart(self) -> None:
        """Reset the count after a mismatch, so that a training loop that catches the error can continue."""
        self.failures, self.count = self.failures + 1, 0
        self.changes.begin_anew(self.failures)


class About(NamedTuple):
    """Identity of an exchange.

    Attributes:
        key: hash that is equal on all participating ranks and different for every other exchange.
        kind: description of the operation, for error messages.
        handles: handles (tensors that hold names) of the exchanged parameters.
        exchanges: counter of the model's exchanges.
        options: (name, value) of options that must be equal on all ranks.
    """

    key: int
    kind: str
    handles: tuple[Tensor, ...]
    exchanges: Exchanges
    options: Options = ()

    @property
    def names(self) -> list[str]:
        return [name_of(handle) for handle in self.handles]

    def __str__(self) -> str:
        names = self.names
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        options = ", ".join(f"{name}={value}" for name, value in self.options if value is not False)
        parameters = f" of {', '.join(names[:4])}{more}" if names else ""
        changes = self.exchanges.changes
        written = f" after {changes.last}" if changes.pending and changes.last and names else ""
        return f"{self.kind}{parameters}{f' with {options}' if options else ''}{written}"


@dataclass(frozen=True)
class Identity:
    """Identity of one parameter: the exchange counter of its model, and a checksum of its name."""

    exchanges: Exchanges
    number: int


def identify(handle: Tensor, exchanges: Exchanges | None) -> None:
    """Attach a parameter's identity to its handle; do nothing if `exchanges` is None."""
    if exchanges is not None:
        setattr(handle, _IDENTITY, Identity(exchanges, zlib.crc32(name_of(handle).encode())))


def about(kind: str, handle: Tensor) -> About | None:
    """Count one exchange of one parameter and return its identity; None if the handle has no identity."""
    found: Identity | None = getattr(handle, _IDENTITY, None)
    if found is None:
        return None
    return About(found.exchanges.next(hash((found.number, _number_of_kind(kind)))), kind, (handle,), found.exchanges)


def exchanges_of(handles: Sequence[Tensor]) -> Exchanges | None:
    """Return the exchange counter of the model of the first handle; None if that handle has no identity."""
    found: Identity | None = getattr(handles[0], _IDENTITY, None) if handles else None
    return None if found is None else found.exchanges


class CalledFor:
    """The parameters for which a compiled program is being called; equal blocks of a model share one program.

    Handles are set only during a call: a handle keeps its model alive, and Dynamo keeps programs longer than models
    live.
    """

    def __init__(self) -> None:
        self._handles: Mapping[str, Tensor] = {}
        self._numbers: dict[str, int] = {}
        self._exchanges: Exchanges | None = None
        self._key = 0
        self._options: Options = ()

    def begin(self, handles: Mapping[str, Tensor], options: Options = ()) -> None:
        """Begin a call for the parameters of these handles.

        Args:
            handles: handles by the names of their placeholders.
            options: (name, value) of the optimizer options that the call reads.
        """
        pairs = ((name, getattr(handle, _IDENTITY, None)) for name, handle in handles.items())
        found: dict[str, Identity] = {name: one for name, one in pairs if one is not None}
        self._handles, self._numbers = handles, {name: one.number for name, one in found.items()}
        self._exchanges = next((one.exchanges for one in found.values()), None)
        if self._exchanges is not None:
            self._key, self._options = self._exchanges.next(_number_of(options)), options

    def end(self) -> None:
        """End the call and drop the handles."""
        self._handles, self._numbers, self._exchanges = {}, {}, None

    def about(self, kind: str, names: Sequence[str]) -> About | None:
        """Return the identity of an exchange in the current call; None if exchanges are not counted.

        Args:
            kind: description of the operation.
            names: placeholder names of the exchanged parameters' handles.
        """
        if self._exchanges is None:
            return None
        known = [name for name in names if name in self._numbers]
        key = hash((self._key, _number_of_kind(kind), *map(self._numbers.__getitem__, known)))
        return About(key, kind, tuple(map(self._handles.__getitem__, known)), self._exchanges, self._options)


@cache
def _number_of_kind(kind: str) -> int:
    """Return a checksum of a collective's kind, so that a gather never matches a reduction."""
    return zlib.crc32(kind.encode())


def _number_of(options: Options) -> int:
    """Return a hash of option values that is equal in all processes.

    Names are left out, because string hashes differ between processes.
    """
    return hash(tuple(value if value == value else 0.5 for _, value in options))  # hashes of NaNs differ


def tag_of(key: int, place: int, nbytes: int) -> int:
    """Return the tag of one message, a positive 32-bit integer.

    Args:
        key: key of the exchange: see `About.key`.
        place: number of the exchange in its graph; its low bits stay in the tag, by which gloo chooses a network
            interface.
        nbytes: size of the message; part of the tag, because gloo ends the process if messages of different sizes
            match.
    """
    return _FIRST_TAG | (hash((key, place, nbytes)) % (1 << _BITS)) * _PLACES | place % _PLACES
