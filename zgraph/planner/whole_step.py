"""Plan a whole training step, as it runs in all calls but the first, which creates optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn, optim

from zgraph.compiler.frame import Frame
from zgraph.driver.compile_frame import FrameCompiler
from zgraph.errors import ZgraphError
from zgraph.graph import meta, nodes
from zgraph.step.capture.capture import Captured, capture
from zgraph.step.capture.lifted import Lifted
from zgraph.step.capture.outputs import NewState, values_of
from zgraph.step.lines.refusals import check_function, check_optimizer
from zgraph.torch_compat.dtensor import dtensor_like

Optimizers = optim.Optimizer | Sequence[optim.Optimizer]
StepMaker = Callable[[nn.Module, Any], Callable[..., Any]]


def as_tuple(optimizers: Optimizers) -> tuple[optim.Optimizer, ...]:
    """Return one optimizer or several as a tuple."""
    return (optimizers,) if isinstance(optimizers, optim.Optimizer) else tuple(optimizers)


def loop_body(model: nn.Module, optimizers: Optimizers) -> Callable[..., Any]:
    """Return a training step for a model whose forward returns the loss, or an object with an attribute `loss`."""
    stepped = as_tuple(optimizers)

    def step(*inputs: Any) -> Any:
        returned = model(*inputs)
        loss = getattr(returned, "loss", returned)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"zgraph.plan: the model's forward returns a {type(returned).__name__}, which has no loss; pass "
                "step_fn, which makes the function that holds the lines of your loop."
            )
        (loss if loss.ndim == 0 else loss.sum()).backward()
        for optimizer in stepped:
            optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step


def plan_whole_step(
    function: Callable[..., Any],
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    inputs: Sequence[Any],
    compiler_of: Callable[[Frame], FrameCompiler],
) -> None:
    """Capture and compile a training step. If its first call creates optimizer state, the second call is planned.

    Args:
        function: function with the lines of the training loop.
        model: model with fake tensors.
        optimizers: optimizers of the model; their state is created.
        inputs: inputs of the function.
        compiler_of: function that returns the compiler of a frame.
    """
    check_function(function, optimizers)
    lifted = Lifted.of(model, optimizers)
    for optimizer in optimizers:
        check_optimizer(optimizer)
    captured = capture(function, lifted, inputs, {})
    if not captured.effects.steps:
        raise ZgraphError("zgraph.plan: the step does not call optimizer.step(); call it, or leave out the optimizer.")
    if captured.effects.makes_state:
        _put_state(captured, lifted)
        lifted.settle()
        lifted = Lifted.of(model, optimizers)
        captured = capture(function, lifted, inputs, {})
    frame = Frame(name="step/0", reason="", inputs=lifted.tensors(), is_step=True)
    compiler_of(frame).compile_step(captured.gm)


def _put_state(captured: Captured, lifted: Lifted) -> None:
    """Add the state that a captured step creates to its optimizers, as fake tensors."""
    states = [one.optimizer.state for one in lifted.optimizers]
    for output, node in values_of(NewState, captured.effects.outputs, nodes.returned_by(captured.gm.graph)):
        value, like = meta.tensor_value(node), output.like
        entries = states[output.number][lifted.parameters[output.position].tensor]
        entries[output.key] = value if like is None else dtensor_like(value, like)
    for number, position, key, constant in captured.effects.constants:
        states[number][lifted.parameters[position].tensor][key] = constant
