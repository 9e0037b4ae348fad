"""Agreement between ranks that all of them run the same collectives.

Every compiled graph has a communication signature: its collectives in order, with group, dtype and size, but without
batch sizes. A rank publishes the signature in the rendezvous store and waits until every peer of its groups has
published an equal one. A collective would not do, because it never ends if only one rank recompiles. If two ranks wait
for each other with different signatures, both raise an error immediately.

The signature has one order for the collectives of all groups, although groups run independently. With one order for
each group, two ranks could wait forever: one for a gather before it starts a reduction, the other for the reduction
before it starts the gather. On NCCL, kernels of two groups may also block each other if ranks launch them in different
orders.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__

from zgraph.compiler.frame_plan import FramePlan
from zgraph.errors import AgreementError
from zgraph.graph import meta, nodes, traits
from zgraph.graph.collective_dispatch import order_of_waits
from zgraph.graph.dataflow import needed_for
from zgraph.graph.text import dtype_text, target_text
from zgraph.graph.traffic import Transfer, transfers
from zgraph.runtime.exchanges.changes import ADVICE_ON_CHANGES
from zgraph.runtime.exchanges.watch import ADVICE, Watch, watch_of
from zgraph.runtime.groups import OF_GATHERS, OF_REDUCTIONS
from zgraph.tiers.devices import is_gpu
from zgraph.torch_compat.dynamo import raise_through_dynamo
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.groups import default_store, is_fake_world, resolve_group
from zgraph.torch_compat.modules import tree_flatten
from zgraph.torch_compat.operators import is_fused_update, written_arguments

_POLL_S = 0.02
_CHANGES = "changes by "  # prefix of the lines of `changes_of`
_PADDING = frozenset({torch.ops.aten.constant_pad_nd.default})  # pads shards that are smaller than others
_UPDATES = "updates "  # prefix of the line of `places_of_updates`


@dataclass(frozen=True)
class Signature:
    """Description of a graph's collectives, which must be equal on all ranks.

    Attributes:
        direction: "forward", "backward", "inference" or "step".
        entries: descriptions of collectives, and other lines that must be equal on all ranks.
        names: the parameters of each entry, for error messages. They are not compared, because equal blocks of a model
            have different names.
        ranks: all ranks of the groups involved.
    """

    direction: str
    entries: tuple[str, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(
        cls,
        direction: str,
        transfers: Sequence[Transfer],
        others: Sequence[str] = (),
        group_names: Sequence[str] = (),
    ) -> Signature:
        """Return the signature of a graph.

        Args:
            direction: direction of the graph.
            transfers: the graph's collectives, in order.
            others: lines from `order_of_waits`, `places_of_updates` and `changes_of`.
            group_names: names of groups whose ranks must agree even if the graph communicates nothing.
        """
        ranks = {rank: None for name in group_names for rank in dist.get_process_group_ranks(resolve_group(name))}
        entries: list[str] = []
        for transfer in transfers:
            members = dist.get_process_group_ranks(resolve_group(transfer.group_name))
            ranks |= dict.fromkeys(members)
            # Described by rank distances, which are equal for all groups along one mesh axis.
            axis = f"r + {[member - members[0] for member in members]}"
            if transfer.group_name.endswith(OF_REDUCTIONS):
                axis += ", reductions"
            elif transfer.group_name.endswith(OF_GATHERS):
                axis += ", gathers"
            coded = "".join(f", made by {method}" for method in transfer.methods)
            entries.append(
                f"{transfer.kind} {dtype_text(transfer.dtype)} {transfer.payload_bytes} bytes{coded} over ranks {axis}"
            )
        names = [", ".join(transfer.parameters) for transfer in transfers] + [""] * len(others)
        return cls(direction, (*entries, *others), tuple(names), tuple(sorted(ranks)))

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.direction, self.entries]).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps([self.direction, self.entries, self.names, self.ranks])

    @classmethod
    def from_json(cls, text: str) -> Signature:
        direction, entries, names, ranks = json.loads(text)
        return cls(direction, tuple(entries), tuple(names), tuple(ranks))


def signatures_of(
    plan: FramePlan, changes: Sequence[str], group_names: Sequence[str], ranks_per_host: int
) -> list[Signature]:
    """Return the signatures of everything that a plan sends, warm-up included.

    Args:
        plan: plan of a frame.
        changes: lines from `changes_of`.
        group_names: as for `Signature.of`.
        ranks_per_host: ranks of each host, on which the order of waits depends.
    """

    def signed(direction: str, graph: fx.Graph) -> Signature:
        others = [*order_of_waits(graph, ranks_per_host), *places_of_updates(graph), *changes]
        return Signature.of(direction, [*transfers(graph)], others, group_names)

    found = [signed(direction, gm.graph) for direction, gm in plan.graphs.items()]
    for variant, following in pairwise(plan.variants):
        closing = "step" if "step" in variant.graphs else "backward"
        warm = f"{closing} of {following.from_step} steps of warm-up"  # the same number on all ranks
        found.append(signed(warm, variant.graphs[closing].graph))
    return found


def places_of_updates(graph: fx.Graph) -> list[str]:
    """Describe, in one line of text, which optimizer updates of a GPU's step run on the host; [] if none does.

    All ranks must agree, because host and GPU round an update differently, and replicas of a parameter must stay equal.
    """
    given = [meta.value(node) for node in graph.find_nodes(op="placeholder")]
    if not any(isinstance(value, Tensor) and is_gpu(value.device) for value in given):
        return []
    updates = [node for node in graph.nodes if is_fused_update(node.target)]
    on_host = [str(number) for number, node in enumerate(updates) if meta.beside(node) is not None]
    return [f"{_UPDATES}{', '.join(on_host)} of {len(updates)} on the host"] if on_host else []


def changes_of(graph: fx.Graph) -> list[str]:
    """Describe each kind of operator that changes a step's parameters or gradients, in one line with its constants.

    All ranks must apply the same operators to shards and replicas. Operators on whole values, before the reductions,
    may differ between ranks.

    Args:
        graph: the graph as captured, before any pass.
    """
    kept = [node for node in graph.find_nodes(op="placeholder") if meta.kept_as(node) == "parameters"]
    needed = needed_for(kept, graph)
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node not in needed or nodes.is_marker(node):
            continue
        numbers = _numbers_of(node) + [number for one in written_arguments(node) for number in _rows_of(one)]
        if written_arguments(node) or numbers:
            # Names of constants count all constants of a trace, which may differ between ranks.
            name = "constant" if node.op == "get_attr" else target_text(node.target)
            found[f"{_CHANGES}{name}({', '.join(numbers)})"] += 1
    return [f"{line}, {count} times" for line, count in sorted(found.items())]


def _numbers_of(node: fx.Node) -> list[str]:
    """Return the constants of an operator, without sizes, which differ between ranks."""
    if node.op == "get_attr":  # torch.tensor(0.5)
        value = getattr(node.graph.owning_module, str(node.target), None)
        return [repr(value.item())] if isinstance(value, Tensor) and value.ndim == 0 and not is_fake(value) else []
    if not node.all_input_nodes or node.target in _PADDING:
        return []
    leaves, _ = tree_flatten((node.args, node.kwargs))
    kinds = (float, int) if torch.Tag.pointwise in getattr(node.target, "tags", ()) else (float,)
    return [repr(leaf) for leaf in leaves if type(leaf) in kinds]


def _rows_of(node: fx.Node) -> list[str]:
    """Return the integer arguments of the views that lead to `node`, such as the 2 of `grad[:2]`."""
    found: list[str] = []
    while traits.is_view(node) and node.all_input_nodes:
        found += [repr(leaf) for leaf in tree_flatten(node.args[1:])[0] if type(leaf) is int]
        node = node.all_input_nodes[0]
    return found


def agree(signatures: Sequence[Signature], timeout_s: float, store: Store | None = None) -> None:
    """Publish this rank's signatures and wait until each peer has published equal ones.

    Args:
        signatures: signatures of one frame's graphs; graphs without collectives need no agreement.
        timeout_s: maximum time to wait for a peer, in seconds.
        store: the rendezvous store; None: the default group's.

    Raises:
        AgreementError: a peer waits with another signature (raised immediately), or has published none in time.
    """
    talking = [signature for signature in signatures if len(signature.ranks) > 1]
    if not talking or (store is None and is_fake_world()):
        return
    store = store or default_store()
    board = _Board(PrefixStore("zgraph/agreement", store), dist.get_rank(), watch_of(store))
    for signature in talking:
        board.publish(signature)
    for signature in talking:
        _wait_for_peers(board, signature, timeout_s)


def _wait_for_peers(board: _Board, signature: Signature, timeout_s: float) -> None:
    pending = [rank for rank in signature.ranks if rank != board.rank]
    deadline = time.monotonic() + timeout_s
    pause = 0.0
    differs = False
    try:
        while pending := board.missing(pending, signature):
            board.wait_with(signature)
            for rank in pending:
                text = board.end_wait(rank, signature)
                if text:
                    raise_through_dynamo(text, AgreementError)
                other = board.waiting_with(rank)
                # The peer waits for a signature that this rank has not published, and cannot publish while it waits.
                # The peer has not published ours: checked again, because it may have done so just before.
                if (
                    other is not None
                    and board.rank in other.ranks
                    and not board.has_published(board.rank, other)
                    and not board.has_published(rank, signature)
                ):
                    differs = True
                    board.end_with(rank)
                    raise_through_dynamo(_difference(board.rank, signature, rank, other), AgreementError)
            if time.monotonic() > deadline:
                raise_through_dynamo(_silence(board.rank, signature, pending, timeout_s), AgreementError)
            time.sleep(pause)
            pause = min(0.25, pause + _POLL_S)
    finally:
        # After a difference the entry stays on the board, so that the peer finds it too.
        if not differs:
            board.wait_with(None)


class _Board:
    """Messages between ranks through the rendezvous store."""

    def __init__(self, store: Store, rank: int, watch: Watch | None = None) -> None:
        self.store = store
        self.rank = rank
        self.watch = watch
        self.number = store.add(f"calls/{rank}", 1)

    def publish(self, signature: Signature) -> None:
        self.store.set(f"published/{self.rank}/{signature.digest}", "1")

    def has_published(self, rank: int, signature: Signature) -> bool:
        return self.store.check([f"published/{rank}/{signature.digest}"])

    def missing(self, ranks: list[int], signature: Signature) -> list[int]:
        """Return those of `ranks` that have not published an equal signature.

        One request checks all ranks together; only if one is missing is each checked separately.
        """
        if self.store.check([f"published/{rank}/{signature.digest}" for rank in ranks]):
            return []
        return [rank for rank in ranks if not self.has_published(rank, signature)]

    def end_wait(self, rank: int, signature: Signature) -> str:
        """End a peer's wait for an exchange that this rank has not started; return the error text, or "" if none waits.

        This rank cannot start the exchange while it waits for the peer's signature.
        """
        stuck = None if self.watch is None else self.watch.stuck(rank)
        if self.watch is None or stuck is None or self.has_published(rank, signature):
            return ""
        text = (
            f"zgraph: rank {self.rank} compiles a {signature.direction} graph that begins with {_entry(signature, 0)}, "
            f"while rank {rank} waits for {stuck['about']}, which rank {self.rank} has not started. Nothing of it was "
            f"used. {ADVICE}"
        )
        self.watch.tell(rank, stuck, text)
        return text

    def wait_with(self, signature: Signature | None) -> None:
        self.store.set(f"waiting/{self.rank}", f"{self.number} {signature.to_json()}" if signature is not None else "")

    def waiting_with(self, rank: int) -> Signature | None:
        """Return the signature with which a peer waits, or None.

        None also for a wait for which this rank has already raised an error, see `end_with`.
        """
        number, _, text = self._read(f"waiting/{rank}").partition(" ")
        return Signature.from_json(text) if text and number != self._read(f"told/{self.rank}/{rank}") else None

    def end_with(self, rank: int) -> None:
        """Record that this rank has raised an error for a peer's wait, so that `waiting_with` ignores this wait."""
        self.store.set(f"told/{self.rank}/{rank}", self._read(f"waiting/{rank}").partition(" ")[0])

    def _read(self, place: str) -> str:
        return self.store.get(place).decode() if self.store.check([place]) else ""


def _difference(rank: int, mine: Signature, peer: int, theirs: Signature) -> str:
    advice = "Give all ranks the same model, options and order of calls."
    if mine.direction != theirs.direction:
        found = f"rank {rank} compiled a {mine.direction} graph, rank {peer} a {theirs.direction} graph"
    else:
        pairs = list(zip_longest(mine.entries, theirs.entries, fillvalue=""))
        position = next(i for i, (ours, other) in enumerate(pairs) if ours != other)
        advice += _more_advice(mine, theirs)
        if any(entry.startswith(_UPDATES) for entry in pairs[position]):
            advice = 'Their plans place updates differently: write zgraph.Offload(update="host"), or "device".'
        if any(entry.startswith(_CHANGES) for entry in pairs[position]):
            ours, other = (entry.removeprefix(_CHANGES) or "nothing more" for entry in pairs[position])
            return (
                f"zgraph: ranks {rank} and {peer} change parameters or gradients by other numbers or operators: "
                f"rank {rank} by {ours}, rank {peer} by {other}. Nothing has been sent. {ADVICE_ON_CHANGES}"
            )
        found = (
            f"the first difference is collective {position} of the {mine.direction} graph: "
            f"rank {rank} has {_entry(mine, position)}, rank {peer} has {_entry(theirs, position)}"
        )
    return f"zgraph: ranks {rank} and {peer} compiled different communication; {found}. Nothing has been sent. {advice}"


def _more_advice(mine: Signature, theirs: Signature) -> str:
    ours, others = ([name for names in one.names for name in names.split(", ") if name] for one in (mine, theirs))
    unshared = [name for name in dict.fromkeys((*ours, *others)) if name not in ours or name not in others]
    if not unshared:
        return (
            " A plan by costs (presets.planned) also depends on the batch that is compiled: begin with one of equal "
            "size on all ranks, and mark the dimensions that vary by torch._dynamo.mark_dynamic."
        )
    more = f" and {len(unshared) - 4} more" if len(unshared) > 4 else ""
    return (
        f" If only some ranks are to run the modules of {', '.join(unshared[:4])}{more}, name these modules: "
        "zgraph.shard(model, optional=[...])."
    )


def _entry(signature: Signature, position: int) -> str:
    if position >= len(signature.entries):
        return f"none (its graph has {len(signature.entries)})"
    about = f" for {signature.names[position]}" if signature.names[position] else ""
    return signature.entries[position] + about


def _silence(rank: int, signature: Signature, peers: Sequence[int], timeout_s: float) -> str:
    return (
        f"zgraph: rank {rank} compiled a {signature.direction} graph with {len(signature.entries)} collectives (first: "
        f"{_entry(signature, 0)}), and rank(s) {', '.join(map(str, peers))} compiled no such graph within "
        f"{timeout_s:g} s. Nothing has been sent. Either they run something else, such as training while this rank "
        "evaluates, or they need longer: "
        'options={"agreement_timeout_s": ...}.'
    )
