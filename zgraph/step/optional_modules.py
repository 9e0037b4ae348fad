"""Whole steps of models with optional modules: ranks tell each other what they run before they choose a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from zgraph.driver.options import CompileOptions
from zgraph.errors import ZgraphError
from zgraph.passes.compress_gradients import CompressGradients
from zgraph.passes.step.interleave_micro_batches import InterleaveMicroBatches
from zgraph.sharding.model.optional_in_steps import Reached
from zgraph.sharding.model.optional_parameters import OptionalParameters
from zgraph.step.capture.lifted import Lifted


def check_options(options: CompileOptions, lifted: Lifted) -> None:
    """Refuse options by which ranks that run different modules would compile different communication.

    Raises:
        ValueError: an option is not supported; the message says what to write instead.
    """
    passes = options.passes
    if not lifted.optional():
        return
    if passes is not None and passes.target is not None:
        what, instead = "passes with a zgraph.Target, by whose costs ranks would plan differently", "leave out target"
    elif passes is not None and any(isinstance(one, CompressGradients) for one in passes.passes):
        what, instead = "compressed gradients", "leave out compression"
    elif passes is not None and any(isinstance(one, InterleaveMicroBatches) for one in passes.passes):
        what, instead = "interleaved micro-batches, in which ranks would differ", "leave out interleave_micro_batches"
    elif lifted.resting is not None:
        what, instead = "zgraph.Offload", "leave out offload"
    elif options.cuda_graph:
        what, instead = "cuda_graph=True", "leave it out"
    else:
        return
    raise ValueError(
        f"zgraph.training_step: the model has modules that ranks may skip (zgraph.shard(optional=...)), and {what}: "
        f'{instead}, or compile the model instead: torch.compile(model, backend="zgraph").'
    )


def unite(
    optional: Sequence[OptionalParameters], reached: Sequence[Reached], *, is_full: bool
) -> tuple[tuple[Reached, ...], bool]:
    """Return what the backwards of a step reach on any rank, and whether any rank may make no further graph.

    Args:
        optional: optional parameters of each call of `zgraph.shard` that has some.
        reached: what the backwards reach on this rank.
        is_full: whether this rank may make no further graph.

    Raises:
        AgreementError: a rank has made another call.
        ZgraphError: a rank has refused the step, or ranks call backward() in different numbers; on all ranks.
    """
    found = [one.united(here, is_full=is_full) for one, here in zip(optional, reached, strict=True)]
    return tuple(united for united, _ in found), any(full for _, full in found)


def tell_refusal(optional: Sequence[OptionalParameters]) -> None:
    """Tell the other ranks, which wait for what this rank runs, that it has refused the step."""
    for one in optional:
        with contextlib.suppress(ZgraphError):
            one.united(None, is_full=False)


def check_limit(optional: Sequence[OptionalParameters], limit: int, *, lacks: bool) -> None:
    """Refuse a step on all ranks if one of them lacks a graph for it, and may make no further one.

    Args:
        optional: as for `unite`.
        limit: the largest number of graphs.
        lacks: whether this rank is such a rank.

    Raises:
        ZgraphError: there is such a rank.
    """
    if any([one.any_lacks(lacks) for one in optional]):
        raise ZgraphError(
            f"zgraph.training_step: {limit} graphs were made on {'this' if lacks else 'another'} rank, for different "
            "calls and for different modules that ranks have skipped. Raise recompile_limit, or make fewer modules "
            "optional."
        )
