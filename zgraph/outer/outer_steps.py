"""`zgraph.OuterSteps`: training across slow links, with exchanges every few steps that run while training goes on."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.compression.methods import BlockMethod, CompressionMethod, LoCo
from zgraph.errors import ZgraphError, ZgraphWarning, check_kind, check_least, is_count
from zgraph.outer.fragments import Fragment, local_tensor, pack
from zgraph.outer.rounds import Anchor, OuterOptimizer
from zgraph.outer.sites import Sites
from zgraph.runtime.collective_error import collective_error
from zgraph.runtime.exchanges.changes import checksum
from zgraph.sharding.scope import scopes_of, window_is_open
from zgraph.sharding.state_dict import meet
from zgraph.tiers.thread_lanes import thread
from zgraph.torch_compat.dynamo import never_compiled, without_compile

FRAGMENTS = 10  # of "auto"
CODEC = LoCo(bits=4)


@dataclass(frozen=True)
class _Round:
    """A round that has begun.

    Attributes:
        anchor: the fragment's anchor.
        sent: [numel], the values of this site when the round began.
        due: number of the step that ends the round.
        overlaps: whether the round runs during later steps.
        found: the new anchor, once the round has run.
    """

    anchor: Anchor
    sent: Tensor
    due: int
    overlaps: bool
    found: Future[Tensor]


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
            None: a single site, whose outer optimizer needs no network.
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
        sites: DeviceMesh | ProcessGroup | None = None,
        *,
        every: int = 30,
        lr: float = 0.6,
        momentum: float = 0.9,
        codec: CompressionMethod | None = CODEC,
        fragments: int | Literal["auto"] = "auto",
        delay: int = 1,
    ) -> None:
        _check(sites, every, lr, momentum, codec, fragments, delay)
        self._model = without_compile(model)
        group = sites.get_group() if isinstance(sites, DeviceMesh) else sites
        self._sites = Sites.of(group)
        self._every, self._delay = every, delay if self._sites.count > 1 else 0
        self._optimizer = OuterOptimizer(lr, momentum)
        self.waited_s = 0.0
        self._thread = thread("sites")
        self._steps = 0
        self._running: list[_Round] = []
        named = self._trained = _trained(self._model)
        _check_values(named, group)
        count = min(FRAGMENTS, every) if fragments == "auto" else fragments
        packed = pack([parameter.numel() for parameter in named.values()], min(count, len(named)))
        names, align = list(named), codec.group if isinstance(codec, BlockMethod) else 1
        resting = next((scope.resting for scope in scopes_of(self._model) if scope.resting is not None), None)
        self._anchors = [
            Anchor(
                Fragment({names[place]: named[names[place]] for place in places}, align, resting), self._sites, codec
            )
            for places in packed
        ]
        self._weights = [0.0] * len(self._anchors)
        self._agree(
            {"every": every, "lr": lr, "momentum": momentum, "codec": codec, "fragments": count, "delay": delay}
            | {name: f"{tuple(local_tensor(one).shape)} {one.dtype}" for name, one in named.items()}
        )

    @never_compiled
    @torch.no_grad()
    def step(self, weight: float = 1.0) -> None:
        """Count a step of the optimizer; call it after each one. Ends the rounds that are due, and begins others.

        Args:
            weight: weight of this step in means over sites, such as its number of tokens.

        Raises:
            ZgraphError: a `no_sync` window is open.
            CollectiveError: the exchange with another site failed.
        """
        self._check_call()
        self._steps += 1
        self._weights = [one + weight for one in self._weights]
        due = [one for one in self._running if one.due <= self._steps]
        beginning = [place for place in range(len(self._anchors)) if self._begins(place)]
        if due or beginning:
            self._check_parameters()
            meet(self._model, "zgraph.OuterSteps.step()")
        for one in due:
            self._end(one)
        for place in beginning:
            self._begin(place, self._delay)

    @never_compiled
    @torch.no_grad()
    def finish(self) -> None:
        """End all rounds, and run a last one of all fragments; then all sites have the same parameters.

        Training can go on afterwards.
        """
        self._check_call()
        self._check_parameters()
        meet(self._model, "zgraph.OuterSteps.finish()")
        for one in [*self._running]:
            self._end(one)
        for place in range(len(self._anchors)):
            self._begin(place, 0)

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
        """Let the parameters be the anchors' values in a `with` block, for example to evaluate what all sites share."""
        with torch.no_grad():
            own = [one.fragment.read() for one in self._anchors]
            self._put([one.values for one in self._anchors])
        try:
            yield
        finally:
            with torch.no_grad():
                self._put(own)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for a checkpoint of this site; waits for exchanges, not for rounds to be due.

        Parameters and optimizer state differ between sites, so each site saves its own. Pass this state as part of
        `extra` to `zgraph.save_checkpoint`. Tensors are not copied.
        """
        return {
            "steps": self._steps,
            "sites": self._sites.count,
            "weights": list(self._weights),
            "running": [self._saved(one) for one in self._running],
            "anchors": [one.state_dict() for one in self._anchors],
        }

    def _saved(self, one: _Round) -> dict[str, Any]:
        one.found.result()  # now the anchor's values
        return {"fragment": self._anchors.index(one.anchor), "due": one.due, "sent": one.sent}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that this rank has saved; training goes on with the same bits.

        If the number of sites has changed, momentum and errors of the codec start from zeros, with a warning.

        Raises:
            ZgraphError: the state belongs to other parameters, fragments or ranks; nothing has changed.
        """
        saved = state_dict["anchors"]
        if [one["parameters"] for one in saved] != [list(one.fragment.names) for one in self._anchors]:
            raise ZgraphError(
                "zgraph.OuterSteps: the state has other fragments; load it with the options that it was saved with."
            )
        for one, state in zip(self._anchors, saved, strict=True):
            one.check(state, same_sites=state_dict["sites"] == self._sites.count)
        if self._running:
            raise ZgraphError("zgraph.OuterSteps: rounds are running; load the state before the first outer.step().")
        if state_dict["sites"] != self._sites.count:
            warnings.warn(
                f"zgraph.OuterSteps: the state is that of {state_dict['sites']} sites, now there are "
                f"{self._sites.count}; momentum and errors of the codec start from zeros.",
                ZgraphWarning,
                stacklevel=2,
            )
        for one, state in zip(self._anchors, saved, strict=True):
            one.load_state_dict(state, same_sites=state_dict["sites"] == self._sites.count)
        self._steps, self._weights = state_dict["steps"], list(state_dict["weights"])
        for one in state_dict["running"]:
            anchor, found = self._anchors[one["fragment"]], Future[Tensor]()
            found.set_result(anchor.values)
            self._running.append(
                _Round(anchor, one["sent"].to(anchor.values.device, copy=True), one["due"], True, found)
            )

    @torch.no_grad()
    def _agree(self, described: Mapping[str, object]) -> None:
        """Check that sites have equal options and parameters, and let them start from equal values.

        Args:
            described: options, and layouts of parameters, by name.

        Raises:
            ZgraphError: on all ranks, if sites differ.
        """
        own = {name: repr(value) for name, value in described.items()}
        for site, (other, _) in enumerate(
            found := self._sites.gathered((own, [checksum([one.values]) for one in self._anchors]))
        ):
            first = found[0][0]
            name = next((name for name in {**first, **other} if first.get(name) != other.get(name)), None)
            if name is not None:
                raise ZgraphError(
                    f"zgraph.OuterSteps: {name} is {other.get(name, 'missing')} on site {site}, and "
                    f"{first.get(name, 'missing')} on site 0; give all sites equal options, and models sharded alike."
                )
        for place, one in enumerate(self._anchors):
            if len({digests[place] for _, digests in found}) > 1:
                self._sites.take_from_first(one.values)
                one.fragment.change(lambda _, one=one: one.values)

    def _check_call(self) -> None:
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

    def _check_parameters(self) -> None:
        """Check that the trained parameters are still those of the fragments.

        Raises:
            ZgraphError: a parameter was frozen, unfrozen, added or replaced.
        """
        now = _trained(self._model)
        for name in {**self._trained, **now}:
            if self._trained.get(name) is not now.get(name):
                raise ZgraphError(
                    f"zgraph.OuterSteps: {name} was frozen, unfrozen, added or replaced after OuterSteps was made, and "
                    "would differ between sites; call outer.finish() before such a change, and make a new OuterSteps "
                    "after it."
                )

    def _put(self, values: list[Tensor]) -> None:
        for one, flat in zip(self._anchors, values, strict=True):
            one.fragment.change(lambda _, flat=flat: flat)

    def _begins(self, place: int) -> bool:
        since = self._steps - place * self._every // len(self._anchors)
        return since > 0 and since % self._every == 0

    def _begin(self, place: int, delay: int) -> None:
        anchor, weight = self._anchors[place], self._weights[place]
        self._weights[place] = 0.0
        sent = anchor.fragment.read()
        found = self._thread.submit(_run, anchor, sent, weight, self._optimizer)
        self._running.append(_Round(anchor, sent, self._steps + delay, delay > 0, found))
        if not delay:
            self._end(self._running[-1])

    def _end(self, one: _Round) -> None:
        start = time.perf_counter()
        try:
            new = one.found.result()
        except RuntimeError as error:
            names, group = one.anchor.fragment.names, self._sites.group_name
            raise collective_error("zgraph.OuterSteps' round", names, group, error) from error
        self.waited_s += time.perf_counter() - start
        self._running.remove(one)
        one.anchor.fragment.change(lambda values: values + (new - one.sent) if one.overlaps else new)


@torch.no_grad()
def _run(anchor: Anchor, sent: Tensor, weight: float, optimizer: OuterOptimizer) -> Tensor:
    return anchor.run_round(sent, weight, optimizer)


def _check(
    sites: object, every: int, lr: float, momentum: float, codec: object, fragments: int | str, delay: int
) -> None:
    who = "zgraph.OuterSteps"
    if isinstance(sites, DeviceMesh) and sites.ndim != 1:
        raise ValueError(
            f"{who}: the mesh has {sites.ndim} axes {sites.mesh_dim_names}; pass the axis of the sites, such as "
            'mesh["site"].'
        )
    check_kind(f"{who}: sites", sites, DeviceMesh | ProcessGroup | None, 'write mesh["site"], a process group or None')
    if not is_count(every):
        raise ValueError(f"{who}: every={every!r}; write a number of steps, at least 1.")
    check_least(who, 0, "a learning rate of at least 0, such as 0.6", lr=lr)
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


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _check_values(named: Mapping[str, nn.Parameter], sites: ProcessGroup | None) -> None:
    if not named:
        raise ZgraphError("zgraph.OuterSteps: no parameter of the model requires gradients; there is nothing to train.")
    for name, parameter in named.items():
        if parameter.is_meta:
            raise ZgraphError(
                f"zgraph.OuterSteps: {name} has no values yet; call zgraph.materialize or load them before."
            )
        if sites is None or not isinstance(parameter, DTensor):
            continue
        shared = {*parameter.device_mesh.mesh.flatten().tolist()} & {*dist.get_process_group_ranks(sites)}
        if len(shared) > 1:
            raise ZgraphError(
                f"zgraph.OuterSteps: {name} is sharded over ranks {sorted(shared)}, which are of different sites, so "
                'all steps would exchange gradients between sites; shard over the ranks of a site, as in mesh["dp"].'
            )
