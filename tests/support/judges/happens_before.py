"""A judge of order: what is read, written and let go while a collective that has not been waited for works on it.

The program is one thread, and each collective another one, which begins when it is started and ends when it is waited
for: of two accesses to one storage neither comes before the other exactly if one belongs to a collective that is under
way. That is the order NCCL's streams, gloo's threads and anything else guarantee, whatever happens to run first; that
a later collective of the same group has been waited for does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from examples.benchmarks.loopback import Transfer
from zgraph.codegen import inductor
from zgraph.codegen import lower_fx as lower
from zgraph.runtime.profiler import Program
from zgraph.torch_compat.inductor import compile_with_inductor
from zgraph.torch_compat.memory import storage_key
from zgraph.torch_compat.modules import tree_flatten
from zgraph.torch_compat.operators import returns_alias, written_tensors

# They look at shape, dtype and device (aten names).
_READ_NO_VALUES = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("empty", "zeros", "ones", "full", "empty_strided")
    for prefix, suffix in (("new_", ""), ("", "_like"))
)


@dataclass(eq=False)
class _Flight:
    """A transfer that works on a storage."""

    transfer: Transfer
    writes: bool
    storage: weakref.ref[torch.UntypedStorage]


@dataclass(eq=False)
class HappensBefore(TorchDispatchMode):
    """Watches a wire, and the operators and islands of compiled programs; see `judging`.

    Attributes:
        races: what it has found, in words.
        transfers: started so far, in order.
        programs, islands: that have run.
        looked: accesses of operators and islands that it has seen.
    """

    races: list[str] = field(default_factory=list[str])
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    programs: int = 0
    islands: int = 0
    looked: int = 0
    _flying: dict[int, list[_Flight]] = field(default_factory=dict[int, list[_Flight]])

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    # --- the wire ---------------------------------------------------------------------------------------------------

    def started(self, transfer: Transfer) -> None:
        name = f"{transfer.kind} {len(self.transfers)}"
        self.transfers.append(transfer)
        self._look(name, reads=transfer.sent, writes=transfer.filled)
        for tensors, writes in ((transfer.sent, False), (transfer.filled, True)):
            for tensor in tensors:
                key = storage_key(tensor)
                assert key is not None

                def freed(_: object, key: int = key, transfer: Transfer = transfer) -> None:
                    self._freed(key, transfer)

                flight = _Flight(transfer, writes, weakref.ref(tensor.untyped_storage(), freed))
                self._flying.setdefault(key, []).append(flight)

    def waited(self, transfer: Transfer) -> None:
        for key, flights in list(self._flying.items()):
            left = [flight for flight in flights if flight.transfer is not transfer]
            if left:
                self._flying[key] = left
            else:
                del self._flying[key]

    def _freed(self, key: int, transfer: Transfer) -> None:
        flights = [flight for flight in self._flying.get(key, ()) if flight.transfer is transfer]
        if flights:
            verb = "fills" if flights[0].writes else "sends"
            self.races.append(f"memory that {self._named(transfer)} {verb} was freed before it was waited for")
            self._flying.pop(key)

    # --- the program ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional":
            return func(*args, **kwargs)  # the wire tells what it starts and waits for
        writes = written_tensors(func, args, kwargs)
        if not (name in _READ_NO_VALUES or (returns_alias(func) and not writes)):
            self._look(f"{func.namespace}.{name}", reads=tree_flatten((args, kwargs))[0], writes=writes)
        return func(*args, **kwargs)

    def compiled(self, gm: Any, inputs: Any) -> Callable[[list[Any]], Any]:
        """In place of `compile_with_inductor`: an island that is looked at as one operator."""
        run = compile_with_inductor(gm, inputs)

        def island(args: list[Any]) -> Any:
            self.islands += 1
            self._look("an island", reads=args)
            return run(args)

        return island

    def _look(self, who: str, *, reads: Iterable[Any] = (), writes: Iterable[Any] = ()) -> None:
        for values, writing in ((reads, False), (writes, True)):
            for value in values:
                tensor = value._local_tensor if isinstance(value, DTensor) else value
                if not isinstance(tensor, Tensor):
                    continue
                self.looked += 1
                for flight in self._flying.get(storage_key(tensor) or -1, ()):
                    if writing or flight.writes:
                        verbs = ("writes" if writing else "reads"), ("fills" if flight.writes else "sends")
                        self.races.append(
                            f"{who} {verbs[0]} what {self._named(flight.transfer)} {verbs[1]} before it was waited for"
                        )

    def _named(self, transfer: Transfer) -> str:
        return f"{transfer.kind} {self.transfers.index(transfer)}"


def judging(patch: pytest.MonkeyPatch) -> HappensBefore:
    """A judge of whatever is lowered from now on.

    Dynamo compiles nothing while a mode is entered, so programs enter it themselves.
    """
    judge = HappensBefore()

    def program(*args: Any) -> Program:
        run = build(*args)

        def judged(args: list[Any]) -> Any:
            judge.programs += 1
            with judge:
                results = run(args)
            judge.races += [
                f"{one.kind} {number} of a program that has ended was not waited for"
                for number, one in enumerate(judge.transfers)
                if not one.was_waited_for
            ]
            return results

        return judged

    build = lower._program
    patch.setattr(lower, "_program", program)
    patch.setattr(inductor, "compile_with_inductor", judge.compiled)
    return judge
