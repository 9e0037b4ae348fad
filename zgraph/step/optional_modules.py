"""Whole steps of models with optional modules: ranks tell each other what they run before they choose a graph."""

from __future__ import annotations

from collections.abc import Sequence

from zgraph.driver.options import CompileOptions
from zgraph.passes.compress_gradients import CompressGradients
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


def unite(optional: Sequence[OptionalParameters], reached: Sequence[Reached]) -> tuple[Reached, ...]:
    """Return what the backwards of a step reach on any rank, from what they reach on this one.

    Raises:
        AgreementError: a rank has made another call, or its step has another number of backwards.
    """
    return tuple(one.united(found) for one, found in zip(optional, reached, strict=True))
