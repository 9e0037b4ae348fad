"""`zgraph.OuterSteps`: training across slow links, with exchanges every few steps that run while training goes on."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zgraph.compression.methods import BlockMethod, CompressionMethod, LoCo
from zgraph.errors import ZgraphError, ZgraphWarning, check_kind, check_least, is_count
from zgraph.reporting.tables import counted, size
from zgraph.sharding.scope import scopes_of, window_is_open
from zgraph.sharding.state_dict import meet
from zgraph.step.outer.fixed_sites import FixedSites
from zgraph.step.outer.fragments import Fragment, local_tensor, pack
from zgraph.step.outer.meeting import Meeting
from zgraph.step.outer.met_sites import MetSites
from zgraph.step.outer.rounds import Anchor, OuterOptimizer
from zgraph.step.outer.saved_state import restored, saved
from zgraph.step.outer.trained import check_unchanged, check_values, trained
from zgraph.step.outer.turns import Running, Timetable
from zgraph.tiers.thread_lanes import thread
from zgraph.torch_compat.dynamo import never_compiled, without_compile

FRAGMENTS = 10  # of "auto"
CODEC = LoCo(bits=4)


class OuterSteps:
    """Train each site by itself, and let an outer optimizer step on what the sites have learnt.

        mesh = init_device_mesh("cpu", (sites, ranks), mesh_dim_names=("site", "dp"))
        model = zgraph.shard(model, mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters())
        outer = zgraph.OuterSteps(model, mesh["site"], every=30)
        for x, y in batches:
            loss = model(x, y); loss.backward(); optimizer.step(); optimizer.zero_grad()
            outer.step()
        outer.finish()

    Each site trains the whole model on its own batches. The parameters are divided into fragments. Every `every` steps,
    a fragment takes part in a round: the changes of all sites since its last round are averaged, and move an anchor
    that is equal on all sites. Rounds of different fragments begin at different steps. A round runs on a thread while
    the next `delay` steps compute; then the parameters become the anchor plus what this site has learnt since the round
    began.

    Every rank calls the same methods at the same steps. Buffers, such as running statistics, stay each site's own.

    Args:
        model: the model, sharded or not, with its values; optimizers come before or after. If sites have different
            values, those of the first site are used.
        sites: mesh with the axis of the sites, or the process group of the ranks at this rank's position in each site.
            Or a `zgraph.Meeting`, if each site is a run of its own. None: a single site, whose outer optimizer needs no
            network.
        every: number of steps between two rounds of a fragment, H in the papers.
        lr, momentum: options of the outer optimizer, Nesterov's method.
        codec: compression of differences between sites; None: sites send parameters as they are.
        fragments: number of fragments, P in the papers, at most `every`; "auto": up to 10.
        delay: number of steps that a round may take, at most `every`; 0: the step that begins a round waits for it.

    Raises:
        ValueError: an option is invalid; the message names it.
        ZgraphError: the model has no parameters that require gradients, one has no values, or sites differ in options
            or parameters.

    Attributes:
        waited_s: seconds for which calls have waited for other sites.

    Source: Douillard et al. 2023, "DiLoCo", arXiv 2311.08105, algorithm 1; Douillard et al. 2025, "Streaming DiLoCo",
    arXiv 2501.18512, which has fragments and delays, and blends instead of keeping what was learnt meanwhile. We differ
    in error feedback, in an outer optimizer divided among sites, and in anchors that are equal bit by bit.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: DeviceMesh | ProcessGroup | Meeting | None = None,
        *,
        every: int = 30,
        lr: float = 0.8,
        momentum: float = 0.7,
        codec: CompressionMethod | None = CODEC,
        fragments: int | Literal["auto"] = "auto",
        delay: int = 1,
    ) -> None:
        _check(sites, every, lr, momentum, codec, fragments, delay)
        self._model = without_compile(model)
        named = self._trained = trained(self._model)
        self._sites = _sites_of(sites, named)
        self._optimizer = OuterOptimizer(lr, momentum)
        self.waited_s = 0.0
        self._counted = 0, 0.0  # bytes and seconds that `zgraph.Metrics` has been told
        self._shows_anchor = False
        self._thread = thread("sites")
        self._steps = 0
        self._running: list[Running] = []
        count = min(FRAGMENTS, every) if fragments == "auto" else fragments
        packed = pack([parameter.numel() for parameter in named.values()], min(count, len(named)))
        names, align = list(named), codec.group if isinstance(codec, BlockMethod) else 1
        resting = next((scope.resting for scope in scopes_of(self._model) if scope.resting is not None), None)
        fragments_of = [
            Fragment({names[place]: named[names[place]] for place in one}, align, resting) for one in packed
        ]
        self._anchors = [Anchor(one, codec, self._sites.count, self._sites.rank) for one in fragments_of]
        self._weights = [0.0] * len(self._anchors)
        self._table = Timetable(every, delay if self._sites.overlaps else 0, len(self._anchors))
        self._sites.join(
            {"every": every, "lr": lr, "momentum": momentum, "codec": codec, "fragments": count, "delay": delay}
            | {name: f"{tuple(local_tensor(one).shape)} {one.dtype}" for name, one in named.items()},
            self._anchors,
        )

    @never_compiled
    @torch.no_grad()
    def step(self, weight: float = 1.0) -> None:
        """Count a step of the optimizer; call it after each one. Ends the rounds that are due, and begins others.

        Args:
            weight: weight of this step in means over sites, such as its number of tokens; finite and not negative.

        Raises:
            ValueError: the weight is invalid.
            ZgraphError: a `no_sync` window is open, sites do not step alike, or a site has values that are not finite.
            CollectiveError: the exchange with another site failed.
        """
        check_least("zgraph.OuterSteps.step", 0, "a finite number, at least 0", weight=weight)
        if not math.isfinite(weight):
            raise ValueError(f"zgraph.OuterSteps.step: weight={weight}; write a finite number, at least 0.")
        self._check_call()
        self._steps += 1
        self._weights = [one + weight for one in self._weights]
        start = time.perf_counter()
        turn = self._sites.turn(self._steps, self._running, self._table)
        self.waited_s += time.perf_counter() - start
        if turn.ending or turn.beginning:
            check_unchanged(self._model, self._trained)
            meet(self._model, "zgraph.OuterSteps.step()")
        for one in turn.ending:
            self._end(one, overlaps=True)
        for request in turn.giving:
            self._thread.submit(self._sites.give, request, self._anchors)
        for number, place in turn.beginning:
            one = self._begin(number, place)
            if not self._table.delay:
                self._end(one, overlaps=False)
        self._count()

    @never_compiled
    @torch.no_grad()
    def finish(self) -> None:
        """End all rounds, and run a last one of all fragments; the parameters then are the anchors.

        If all sites call this at the same step, all have the same parameters afterwards. At a `zgraph.Meeting` others
        may train on. Training can go on here, too.

        Raises:
            ZgraphError: as for `step`; or rounds at a meeting fail again and again, and parameters of this site have
                not been exchanged.
            CollectiveError: as for `step`.
        """
        self._check_call()
        check_unchanged(self._model, self._trained)
        meet(self._model, "zgraph.OuterSteps.finish()")
        for one in [*self._running]:
            self._end(one, overlaps=True)
        missing = set(range(self._table.fragments))
        for number, place in self._sites.last_turns(self._steps, self._table):
            if self._end(self._begin(number, place), overlaps=False):
                missing.discard(place)
            if not missing:
                self._count()
                return
        names = self._anchors[min(missing)].fragment.names
        raise ZgraphError(
            f"zgraph.OuterSteps.finish: {len(missing)} fragments, the first with {names[0]}, have not been exchanged: "
            f"{self._sites.why_not()}. Parameters of this site have changed nothing at other sites since their last "
            "round; call outer.finish() again, or save them."
        )

    def __str__(self) -> str:
        table, rounds = self._table, sum(one.state.rounds for one in self._anchors)
        shape = f"{counted(self._sites.count, 'site')}, {counted(table.fragments, 'fragment')}, every={table.every}"
        done = f"{counted(self._steps, 'step')}, {counted(rounds, 'round')}, {size(self.sent_bytes)} sent"
        return f"OuterSteps: {shape}; {done}, waited {self.waited_s:.1f} s, keeps {size(self.kept_bytes)}"

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other sites so far."""
        return self._sites.sent_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank keeps between steps: anchors, momentum, errors, and values of rounds that run."""
        return sum(one.kept_bytes for one in self._anchors) + sum(one.sent.nbytes for one in self._running)

    @contextlib.contextmanager
    def anchor(self) -> Generator[None]:
        """Let the parameters be the anchors' values in a `with` block, for example to evaluate what all sites share.

        All ranks of a site enter and leave the block.

        Raises:
            ZgraphError: a `no_sync` window is open, or this is called inside such a block.
            AgreementError: a rank of this site makes another call.
        """
        with torch.no_grad():
            self._check_call()
            meet(self._model, "zgraph.OuterSteps.anchor()")
            wait([one.found for one in self._running])  # so that all sites see the same anchors
            own = [one.fragment.read() for one in self._anchors]
            self._write([one.values for one in self._anchors])
        self._shows_anchor = True
        try:
            yield
        finally:
            self._shows_anchor = False
            with torch.no_grad():
                self._write(own)

    def _write(self, values: Sequence[Tensor]) -> None:
        for one, flat in zip(self._anchors, values, strict=True):
            one.fragment.write(flat)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for a checkpoint of this site; waits for exchanges, not for rounds to be due.

        Parameters and optimizer state differ between sites, so each site saves its own. Pass this state as part of
        `extra` to `zgraph.save_checkpoint`. Tensors are not copied.
        """
        wait([one.found for one in self._running])
        for one in [one for one in self._running if one.found.exception() is not None]:
            self._drop(one)
        return {
            "steps": self._steps,
            "weights": list(self._weights),
            "running": [{"fragment": one.place, "begun_at": one.begun_at, "sent": one.sent} for one in self._running],
            "anchors": [saved(one) for one in self._anchors],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that this rank has saved; training goes on with the same bits.

        If the number of sites has changed, momentum and errors of the codec start from zeros, with a warning.

        Raises:
            ZgraphError: the state belongs to other parameters, fragments or ranks, or sites load states of different
                steps; nothing has changed.
        """
        if isinstance(self._sites, MetSites):
            raise ZgraphError(
                "zgraph.OuterSteps: a site that comes to a zgraph.Meeting gets the anchors of the others; load the "
                "model and the optimizer before OuterSteps is made, and leave out load_state_dict."
            )
        if self._running:
            raise ZgraphError("zgraph.OuterSteps: rounds are running; load the state before the first outer.step().")
        states = restored(self._anchors, state_dict["anchors"])
        self._sites.check_loaded(state_dict["steps"], states)
        before, own = state_dict["anchors"][0], self._anchors[0].state
        if (before["sites"], before["site"]) != (own.sites, own.site):
            warnings.warn(
                f"zgraph.OuterSteps: the state is that of site {before['site']} of {before['sites']}, and this is site "
                f"{own.site} of {own.sites}; momentum and errors of the codec start from zeros.",
                ZgraphWarning,
                stacklevel=2,
            )
        for anchor, state in zip(self._anchors, states, strict=True):
            anchor.state = state
        self._steps, self._weights = state_dict["steps"], list(state_dict["weights"])
        for entry in state_dict["running"]:
            found, values = Future[Tensor | None](), self._anchors[entry["fragment"]].values
            found.set_result(values)  # at most one round of a fragment is running
            sent = entry["sent"].to(values.device, copy=True)
            self._running.append(Running(entry["fragment"], 0, sent, 0.0, entry["begun_at"], 0.0, found))

    def __getstate__(self) -> Never:
        raise ZgraphError(
            "zgraph.OuterSteps: it belongs to its model and its sites, and is neither copied nor pickled; save "
            "outer.state_dict(), or make a zgraph.OuterSteps of the copied model."
        )

    def _check_call(self) -> None:
        if self._shows_anchor:
            raise ZgraphError(
                "zgraph.OuterSteps: called inside `with outer.anchor()`, where parameters are not this site's; call it "
                "after the block."
            )
        if any(scope.handle_of is not None for scope in scopes_of(self._model)):
            raise ZgraphError(
                "zgraph.OuterSteps: called in a function decorated by zgraph.training_step, of which only a graph runs "
                "later; call outer.step() after the decorated function."
            )
        if window_is_open(self._model):
            raise ZgraphError(
                "zgraph.OuterSteps: a no_sync window is open, which still needs the parameters as they are; call "
                "outer.step() after the optimizer's step, outside of no_sync."
            )

    def _count(self) -> None:
        """Tell each `zgraph.Metrics` of the model the bytes sent and the seconds waited since the last call."""
        now = self.sent_bytes, self.waited_s
        (sent_bytes, waited_s), self._counted = self._counted, now
        for clock in dict.fromkeys(clock for scope in scopes_of(self._model) for clock in scope.clocks):
            clock.add_outer_step(now[0] - sent_bytes, now[1] - waited_s)

    def _begin(self, number: int, place: int) -> Running:
        anchor, weight = self._anchors[place], self._weights[place]
        sent = anchor.fragment.read()
        self._sites.check_finite(sent, anchor.fragment.names)
        self._weights[place] = 0.0
        found = self._thread.submit(self._run, anchor, sent, weight, number, place)
        self._running.append(Running(place, number, sent, weight, self._steps, time.monotonic(), found))
        return self._running[-1]

    @torch.no_grad()
    def _run(self, anchor: Anchor, sent: Tensor, weight: float, number: int, place: int) -> Tensor | None:
        return self._sites.run_round(anchor, sent, weight, self._optimizer, number, place)

    def _end(self, one: Running, *, overlaps: bool) -> bool:
        """Wait for a round, and let the parameters be its anchor, with what was learnt meanwhile if rounds overlap.

        Returns:
            Whether the round has changed the anchor; if not, it was given up, and the parameters stay.
        """
        start = time.perf_counter()
        wait([one.found])
        self.waited_s += time.perf_counter() - start
        new = None if one.found.exception() is not None else one.found.result()
        if new is None:
            self._drop(one)
            one.found.result()  # raises its error
            return False
        self._running.remove(one)
        fragment = self._anchors[one.place].fragment
        fragment.write(fragment.read() + (new - one.sent) if overlaps else new)
        return True

    def _drop(self, one: Running) -> None:
        """Forget a round that has changed nothing; its steps count in the fragment's next round."""
        self._running.remove(one)
        self._weights[one.place] += one.weight


def _sites_of(
    sites: DeviceMesh | ProcessGroup | Meeting | None, named: Mapping[str, nn.Parameter]
) -> FixedSites | MetSites:
    group = sites.get_group() if isinstance(sites, DeviceMesh) else sites
    check_values(named, group if isinstance(group, ProcessGroup) else None)
    return MetSites(group) if isinstance(group, Meeting) else FixedSites(group)


def _check(
    sites: object, every: int, lr: float, momentum: float, codec: object, fragments: int | str, delay: int
) -> None:
    who = "zgraph.OuterSteps"
    if isinstance(sites, DeviceMesh) and sites.ndim != 1:
        raise ValueError(
            f"{who}: the mesh has {sites.ndim} axes {sites.mesh_dim_names}; pass the axis of the sites, such as "
            'mesh["site"].'
        )
    check_kind(
        f"{who}: sites", sites, DeviceMesh | ProcessGroup | Meeting | None, 'write mesh["site"], a Meeting or None'
    )
    if not is_count(every):
        raise ValueError(f"{who}: every={every!r}; write a number of steps, at least 1.")
    check_least(who, 0, "a learning rate of at least 0, such as 0.8", lr=lr)
    check_least(who, 0, "a number from 0 up to, not including, 1", momentum=momentum)
    if not float(momentum) < 1:
        raise ValueError(f"{who}: momentum={momentum}; write a number from 0 up to, not including, 1.")
    check_kind(
        f"{who}: codec", codec, CompressionMethod | None, "write zgraph.passes.LoCo(bits=4), another method, or None"
    )
    if fragments != "auto" and not (is_count(fragments) and fragments <= every):
        raise ValueError(f'{who}: fragments={fragments!r} with every={every}; write "auto", or 1 to {every}.')
    if not (is_count(delay, 0) and delay <= every):
        raise ValueError(f"{who}: delay={delay!r} with every={every}; write 0 to {every} steps.")
