"""Stores: the memory of each tier on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.tiers.disk.folder import DiskFolder
from zgraph.tiers.tier import HOST, Copy, Store, Tier
from zgraph.torch_compat.fake_values import is_fake

_METHODS = ("holds", "empty", "start_in", "start_out", "finish")  # of a `Store`


@dataclass
class Stores:
    """The stores of all tiers other than the host. A store is kept only as long as a model uses it.

    Attributes:
        by_key: stores by `Tier.key`, the string by which operators name a tier.
        tiers: tiers of these stores, by the same keys.
    """

    by_key: WeakValueDictionary[str, Store] = field(default_factory=WeakValueDictionary[str, Store])
    tiers: dict[str, Tier] = field(default_factory=dict[str, Tier])

    def of(self, tensor: Tensor) -> Store | None:
        """Return the store that holds a tensor; None for a tensor in host memory."""
        return next((store for store in [*self.by_key.values()] if store.holds(tensor)), None)

    def checked(self, new: Tensor, name: str, owner: Store | None = None) -> Tensor:
        """Return new memory after asking every store whether it holds this memory.

        Args:
            new: tensor in memory that has just been allocated.
            name: name of the tensor, for error messages.
            owner: store that allocated the memory; None for the host.

        Raises:
            ZgraphError: a user's store holds memory that it did not allocate, or does not hold memory that it did.
        """
        if not new.numel() or is_fake(new):
            return new
        for store in [*self.by_key.values()]:
            if store.holds(new) == (store is owner):
                continue
            kind = type(store).__name__
            if store is owner:
                raise ZgraphError(
                    f"zgraph.Tier: {kind}.holds() returned False for {name}, which its empty() has returned; return "
                    "True as long as the tensor lives."
                )
            raise ZgraphError(
                f"zgraph.Tier: {kind}.holds() returned True for new memory of {name}, which its empty() has not "
                "returned. When a tensor dies, forget its address, which other memory can get: "
                "weakref.finalize(tensor.untyped_storage(), addresses.discard, address)."
            )
        return new

    def open(self, tier: Tier, lanes: Any, rank: int) -> Store:
        """Return the store of a tier on this rank, opened on first use; models with equal tiers share it.

        Raises:
            ValueError: a different tier with the same name is in use.
        """
        found = self.by_key.get(tier.key)
        if found is not None and self.tiers.get(tier.key, tier) != tier:
            raise ValueError(
                f"zgraph.Tier: {tier!r} and {self.tiers[tier.key]!r}, which a model uses, have the same name; give "
                "each a name of its own, or pass equal tiers."
            )
        if found is None:
            found = tier.open(lanes, rank)
            missing = [name for name in _METHODS if not callable(getattr(found, name, None))]
            if missing:
                raise ZgraphError(
                    f"zgraph.Tier: {type(tier).__name__}.open() returned a {type(found).__name__} without "
                    f"{', '.join(missing)}; return an object with the methods of zgraph.tiers.tier.Store."
                )
            if tier != HOST:
                self.by_key[tier.key], self.tiers[tier.key] = found, tier
        return found

    def folder(self, path: str, rank: int) -> Store:
        """Return the store of this rank's file in a folder, opened on first use.

        Raises:
            DiskError: the folder cannot be used.
        """
        return OnDisk(DiskFolder(path, rank))


@dataclass(eq=False)
class OnDisk:
    """Store of one rank's tensors in a folder on disk."""

    folder: DiskFolder

    def holds(self, tensor: Tensor) -> bool:
        return self.folder.is_on_disk(tensor)

    def empty(self, like: Tensor, name: str) -> Tensor:
        return self.folder.empty(like.shape, like.dtype, name)

    def start_in(self, kept: Tensor, lanes: Any) -> Copy:
        return lanes.from_disk(self.folder, kept)

    def start_out(self, source: Tensor, kept: Tensor, lanes: Any) -> Copy:
        return lanes.to_disk(self.folder, source, kept)

    def finish(self) -> None:
        self.folder.finish()


class Pool(Protocol):
    """Allocator of host memory."""

    def empty_like(self, tensor: Tensor) -> Tensor: ...

    def holds(self, tensor: Tensor) -> bool: ...


@dataclass(eq=False)
class HostMemory:
    """Store of tensors in host memory. `finish` does nothing, because copy lanes wait for their host copies."""

    pool: Pool

    def holds(self, tensor: Tensor) -> bool:
        return self.pool.holds(tensor)

    def empty(self, like: Tensor, name: str) -> Tensor:
        return self.pool.empty_like(like)

    def start_in(self, kept: Tensor, lanes: Any) -> Copy:
        return lanes.from_host(kept)

    def start_out(self, source: Tensor, kept: Tensor, lanes: Any) -> Copy:
        return lanes.to_host(source, kept)

    def finish(self) -> None:
        pass


@dataclass(frozen=True)
class _Checked:
    """A copy started by a user's store; `wait` checks the copy's result."""

    copy: Copy
    like: Tensor
    name: str

    def wait(self) -> Tensor:
        found: Any = self.copy.wait()
        if isinstance(found, Tensor) and found.shape == self.like.shape and found.dtype == self.like.dtype:
            return found
        kind = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else f"{found!r:.80}"
        raise ZgraphError(
            f"zgraph.Tier: the copy that {self.name} started returned {kind} from wait(); return the copied tensor, "
            f"{tuple(self.like.shape)} of {self.like.dtype}."
        )


def copied_in(store: Store, kept: Tensor, lanes: Any) -> Copy:
    """Start copying a tensor from a store to the device.

    Raises:
        ZgraphError: a user's store returned no copy. The copy's `wait` raises it if the result is unlike the tensor.
    """
    return _checked(store.start_in(kept, lanes), store, kept, "start_in()")


def copied_out(store: Store, source: Tensor, kept: Tensor, lanes: Any) -> Copy:
    """Start copying the device tensor `source` over `kept`, a tensor of a store; errors as for `copied_in`."""
    return _checked(store.start_out(source, kept, lanes), store, kept, "start_out()")


def _checked(copy: Copy, store: Store, like: Tensor, method: str) -> Copy:
    if isinstance(store, HostMemory | OnDisk):
        return copy
    name = f"{type(store).__name__}.{method}"
    if not callable(getattr(copy, "wait", None)):
        raise ZgraphError(
            f"zgraph.Tier: {name} returned {copy!r:.80}; return an object with wait(), which returns the copied tensor."
        )
    return _Checked(copy, like, name)


def allocated(store: Store, like: Tensor, name: str) -> Tensor:
    """Return an uninitialised tensor of a store, with the shape and dtype of `like`.

    Raises:
        ZgraphError: a user's store returned a tensor of another shape or dtype.
    """
    found: Any = store.empty(like, name)
    if not isinstance(found, Tensor):
        raise ZgraphError(
            f"zgraph.Tier: {type(store).__name__}.empty() returned {found!r:.80} for {name}; return a tensor like the "
            f"one that is given, {tuple(like.shape)} of {like.dtype}."
        )
    if found.shape != like.shape or found.dtype != like.dtype:
        raise ZgraphError(
            f"zgraph.Tier: {type(store).__name__}.empty() returned {tuple(found.shape)} of {found.dtype} for {name}; "
            f"return a tensor like the one that is given, {tuple(like.shape)} of {like.dtype}."
        )
    return found
