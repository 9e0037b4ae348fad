"""`zgraph.AdamW8bit`: AdamW whose moments take one byte each, for weights of fp32 or of bf16 with 8 further bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from zgraph.dialect.adam import packed_adamw_op
from zgraph.errors import ZgraphError
from zgraph.optimizers.packed_entries import (
    DTYPES,
    PACKED,
    check_entries,
    check_options,
    fits,
    loaded,
    local_part,
    own_options,
    packed_zeros,
    unpacked,
)


class AdamW8bit(optim.Optimizer):
    """AdamW with state of 2.1 bytes per element of fp32 weights, or 3.1 bytes per element of bf16 weights.

    Takes the place of torch.optim.AdamW. Moments are 8-bit codes in groups of 32; updates compute in fp32. A bf16
    weight has 8 further bits in the state, so that small updates are not lost: weights, state and gradients together
    take 7.1 bytes per element; with torch.optim.AdamW in fp32 they take 16. Vectors, and tensors whose rows are no
    multiple of 32 elements, keep moments of fp32.

    Works on plain tensors, on the parameters of `zgraph.shard` and on other DTensors, in `zgraph.training_step` and in
    plain lines, with `GradScaler`, learning rate schedulers and checkpoints. Results do not depend on the number of
    ranks. The layout of the state is described in `zgraph.compression.packed_state`.

    Changing a bf16 weight between steps keeps its 8 further bits, which then add at most half a unit in its last place.

    Args:
        params: fp32 or bf16 parameters, or groups of them.
        lr: learning rate, a number or a tensor.
        betas, eps, weight_decay, maximize: as in torch.optim.AdamW.

    Raises:
        ValueError: an option is out of range, or a parameter has another dtype.

    Source: FlashOptim, arXiv 2602.23349, with other codes (see `packed_state`).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        # `fused`: the step is one call for all parameters, which may run on the host or in a GradScaler's step.
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "fused": True})
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_options(param_group)
            for parameter in param_group["params"]:
                if parameter.dtype not in DTYPES:
                    raise ValueError(
                        f"zgraph.AdamW8bit: a parameter of shape {list(parameter.shape)} is {parameter.dtype}; make it "
                        "torch.bfloat16 or torch.float32."
                    )
        except ValueError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and gradients first.

        Returns:
            The loss of `closure`.

        Raises:
            ZgraphError: a gradient has another dtype or other placements than its parameter, or is sparse; or a
                parameter has changed its dtype, shape or placement since its first step. Nothing is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        stepped = [[one for one in group["params"] if one.grad is not None] for group in self.param_groups]
        grads = [[_gradient_of(one) for one in members] for members in stepped]
        states = [[self._state_of(one) for one in members] for members in stepped]
        for group, members, own_grads, own_states in zip(self.param_groups, stepped, grads, states, strict=True):
            if not members:
                continue
            steps = [entries["step"] for entries in own_states]
            torch.ops.aten._foreach_add_.Scalar(steps, 1)
            lr, (beta1, beta2) = group["lr"], group["betas"]
            lr = float(lr) if isinstance(lr, int) else lr
            packed_adamw_op(lr)(
                [local_part(one) for one in members],
                own_grads,
                [local_part(entries[PACKED]) for entries in own_states],
                steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            if found_inf is not None:
                torch.ops.aten._foreach_sub_.List(steps, [found_inf] * len(steps))
        return loss

    def unpacked_state_dict(self) -> dict[str, Any]:
        """Return a state dict of torch.optim.AdamW, with a further tensor for every parameter: "weight".

        All three are fp32 copies in the shape of the parameter, and placed like it. Load the weights into an fp32
        model, and the rest into torch.optim.AdamW; `load_state_dict` of this class takes it back.
        """
        found = self.state_dict()
        made: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self._parameters()):
            entries = found["state"].get(index, {})
            count = {"step": entries["step"].clone()} if entries else {}
            made[index] = {**count, **unpacked(parameter, entries.get(PACKED))}
        return {**found, "state": made}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check whether `load_state_dict` can load a state dict.

        Raises:
            ValueError: it has options or entries that this optimizer lacks, or for other parameters.
        """
        for group in state_dict["param_groups"]:
            own_options(group)
        for index, parameter, entries in self._saved(state_dict):
            check_entries(index, parameter, entries)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of `unpacked_state_dict`, or of torch.optim.AdamW.

        Moments of fp32 become codes, rounded to nearest. A "weight" of fp32 overwrites its parameter.

        Raises:
            ValueError: as for `check_state_dict`; nothing is changed.
        """
        saved: list[tuple[int, Tensor, Mapping[str, Any]]] = []

        # torch casts every entry but the step to the dtype of its parameter. So it gets the steps alone, after all of
        # the user's hooks before a load, and the rest is loaded before all of the user's hooks after it.
        def before(optimizer: optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            self.check_state_dict(given)
            saved.extend(self._saved(given))
            steps = {index: entries["step"] for index, _, entries in saved if "step" in entries}
            counts = {
                index: {"step": torch.as_tensor(step, dtype=torch.float32).clone()} for index, step in steps.items()
            }
            return {**given, "state": counts, "param_groups": [own_options(group) for group in given["param_groups"]]}

        def after(optimizer: optim.Optimizer) -> None:
            for _, parameter, entries in saved:
                packed = loaded(parameter, entries)
                if packed is not None:
                    self.state[parameter][PACKED] = packed

        hooks = [self.register_load_state_dict_pre_hook(before)]
        hooks.append(self.register_load_state_dict_post_hook(after, prepend=True))
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _parameters(self) -> Iterable[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _saved(self, state_dict: Mapping[str, Any]) -> list[tuple[int, Tensor, Mapping[str, Any]]]:
        """Return the saved entries of parameters that have some, with the parameter's number in the state dict."""
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        pairs = zip(indices, self._parameters(), strict=False)  # torch refuses other numbers of them
        entries = state_dict["state"]
        return [(index, parameter, entries[index]) for index, parameter in pairs if entries.get(index)]

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter; in its first step, the state is made."""
        entries = self.state[parameter]
        if "step" not in entries and parameter.dtype in DTYPES:
            entries["step"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
            entries[PACKED] = packed_zeros(parameter)
        if not fits(parameter, entries.get(PACKED)):
            raise ZgraphError(
                f"zgraph.AdamW8bit: a parameter is {parameter.dtype} and of shape {list(parameter.shape)}, but its "
                "state is of another; create the optimizer after the model has its dtype and shape, and "
                "load state with load_state_dict."
            )
        return entries


def _gradient_of(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    placements = [one.placements if isinstance(one, DTensor) else None for one in (parameter, grad)]
    if grad.dtype != parameter.dtype or grad.is_sparse or placements[0] != placements[1]:
        raise ZgraphError(
            f"zgraph.AdamW8bit: the gradient of a parameter of shape {list(parameter.shape)} is {grad.layout}, "
            f"{grad.dtype} and placed {placements[1]}, and the parameter {parameter.dtype} and placed "
            f"{placements[0]}; leave gradients as backward makes them."
        )
    local = local_part(grad)
    return local.contiguous() if 0 in local.stride() else local  # an expanded one cannot be divided in place
