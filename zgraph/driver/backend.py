"""The backend function of `torch.compile(model, backend="zgraph")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from zgraph.compiler.frame import Frame
from zgraph.driver.compile_frame import FrameCompiler
from zgraph.driver.options import OF_STEPS, CompileOptions
from zgraph.driver.written_in_graphs import refuse_written_weights, watch_outputs
from zgraph.torch_compat.dynamo import raise_through_dynamo


def zgraph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one frame for Dynamo; torch finds this backend through the entry point `torch_dynamo_backends`.

    Args:
        gm: graph of the frame.
        example_inputs: inputs of the graph in the current call.
        options: see `zgraph.driver.options.CompileOptions`.
        mode: torch.compile's `mode`, a preset of Inductor; must be None.

    Raises:
        ValueError: an option is unknown or cannot be honoured.
    """
    if mode is not None:
        raise_through_dynamo(
            f"zgraph: torch.compile's mode={mode!r} belongs to its own Inductor backend; leave mode out, and write "
            'options={"lowering": ...} or options={"passes": ...} instead.'
        )
    try:
        parsed = CompileOptions.parse(options)
    except ValueError as error:
        raise_through_dynamo(str(error))
    for name in OF_STEPS:
        if getattr(parsed, name):
            raise_through_dynamo(
                f"zgraph: {name} requires a whole step; torch.compile gives separate forward and backward graphs. "
                f'Write @zgraph.training_step(model, opt, options={{"{name}": True}}) above the function that holds '
                "the lines of the step."
            )
    frame = Frame.of_dynamo(gm)
    frame.check_batch()
    frame.check_tokens(gm)
    handles = frame.handle_names()
    refuse_written_weights(gm, handles)
    return watch_outputs(gm, handles, FrameCompiler(frame, parsed).compile(gm, example_inputs))
