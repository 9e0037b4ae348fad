"""`zgraph.LayerDrop`: progressive layer dropping, with masks that are equal on all ranks and are part of no graph."""

from __future__ import annotations

import copy
import functools
import math
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from zgraph.errors import ZgraphError
from zgraph.sharding.scope import Scope, state_of
from zgraph.torch_compat.autograd import is_in_backward
from zgraph.torch_compat.dynamo import (
    breaks_graphs,
    constant_in_graphs,
    never_a_frame,
    no_frames_inside,
    raise_through_dynamo,
    without_compile,
)
from zgraph.torch_compat.modules import hook_steps, local_parameters

PLACE = "_zgraph_layer_drop"  # attribute of a block


class Place(NamedTuple):
    """What a block knows of its `LayerDrop`: which block it is."""

    drop: LayerDrop
    number: int


class LayerDrop:
    """Drop whole blocks of a model at random in training: more of them later in training, and deeper in the model.

        drop = zgraph.LayerDrop(model.layers, theta=0.5, gamma=100 / steps)     # the training loop stays as it is

    A block that is dropped is not called: it gathers, computes and reduces nothing, and its parameters get no gradient,
    so that optimizers leave them alone. In step t, block l of L is kept with probability

        p_l(t) = 1 - l/L (1 - theta(t)),    theta(t) = (1 - theta) exp(-gamma t) + theta,    l = 1 ... L,

    and a kept block returns x + (block(x) - x) / p_l, whose mean is the block's output. Step 0 keeps all blocks.

    A mask holds for all forwards up to the next optimizer step: for all micro-batches, and for what backward computes
    again. It is a function of the seed and the number of the step, so it is equal on all ranks, and takes nothing from
    torch's random numbers. Blocks in evaluation mode are never dropped. With `theta=1`, nothing changes.

    The model may be sharded or not, compiled or not, before this call or after it. Dynamo does not trace the training
    calls of blocks: each block is compiled as a frame of its own, and equal blocks share graphs, so masks add none.

    Source: Zhang and He 2020, arXiv:2010.13369. There each of a block's two sublayers is scaled by 1/p_l; here the
    block is scaled as a whole, so that nothing must be known of its inside.

    Args:
        blocks: modules such as `model.layers`, in their order. Each takes hidden states as its first argument, or as
            `hidden_states`, and returns hidden states of the same shape and dtype, or a tuple of them and Nones.
        theta: probability with which the last block is kept in the end, more than 0 and at most 1.
        gamma: speed at which theta(t) falls from 1 to `theta`, per step. With 100 / number of steps it has fallen after
            a twentieth of the training.
        seed: seed of the masks, the same on all ranks.

    Raises:
        ValueError: an option is out of its range, or a block is listed twice or dropped by another LayerDrop.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, theta: float = 0.5, gamma: float = 1e-3, seed: int = 0) -> None:
        self.blocks = tuple(without_compile(block) for block in blocks)
        self.theta, self.gamma, self.seed = theta, gamma, seed
        if not 0 < theta <= 1:
            raise ValueError(f"zgraph.LayerDrop: theta={theta} must be more than 0 and at most 1, which drops nothing.")
        if not 0 <= gamma < math.inf:
            raise ValueError(f"zgraph.LayerDrop: gamma={gamma} must be finite and not negative; write 100 / steps.")
        if not self.blocks:
            raise ValueError("zgraph.LayerDrop: there is no block; pass the list of blocks, such as model.layers.")
        for number, block in enumerate(self.blocks):
            first = next(place for place, other in enumerate(self.blocks) if other is block)
            if first != number:
                raise ValueError(
                    f"zgraph.LayerDrop: block {number} is the same module as block {first}, so a mask cannot tell them "
                    "apart; list different modules, which may share parameters."
                )
            if PLACE in block.__dict__:
                raise ValueError(
                    f"zgraph.LayerDrop: block {number} ({type(block).__name__}) is dropped by another LayerDrop; make "
                    "one for all blocks."
                )
        self.drops = theta < 1
        self._step, self._has_stepped, self._is_agreed = 0, False, False
        self._kept: tuple[bool, ...] = ()
        self._unchecked: set[int] = set()
        self._returned: list[int | None] = [None] * len(self.blocks)  # items of a tuple; 0: a tensor; None: not seen
        for number, block in enumerate(self.blocks):
            block.__dict__[PLACE] = Place(self, number)
            block.__class__ = dropping_class(type(block))
        self._watch_steps()
        self._draw()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerDrop:
        """Return the LayerDrop of a copied model, which counts the steps of the copy's optimizers."""
        memo[id(self)] = copied = object.__new__(LayerDrop)
        vars(copied).update({name: copy.copy(value) for name, value in vars(self).items()})
        copied.blocks = tuple(copy.deepcopy(block, memo) for block in self.blocks)
        copied._watch_steps()
        return copied

    def _watch_steps(self) -> None:
        me = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (alive := me()) is not None:
                alive._note_step(optimizer)

        hook_steps(self, after=stepped)

    @property
    def step(self) -> int:
        """Number of optimizer steps so far, from which the next mask is drawn. Assign it where no torch.optim steps."""
        return self._step + self._has_stepped

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._has_stepped, self._is_agreed = step, False, False
        self._draw()

    @property
    def kept(self) -> tuple[bool, ...]:
        """For each block, whether the next training forward keeps it."""
        return self._kept if not self._has_stepped else self._mask(self.step)

    def probabilities(self, step: int) -> list[float]:
        """Return the probability with which each block is kept in a step."""
        now = (1 - self.theta) * math.exp(-self.gamma * step) + self.theta
        return [1 - (number + 1) / len(self.blocks) * (1 - now) for number in range(len(self.blocks))]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the step, and what a resumed run must know of the blocks."""
        return {"step": self.step, "seed": self.seed, "returned": list(self._returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the masks of a saved run.

        Raises:
            ValueError: the run had another seed, or another number of blocks.
        """
        found = state["seed"], len(state["returned"])
        if found != (self.seed, len(self.blocks)):
            raise ValueError(
                f"zgraph.LayerDrop: the saved run has seed {found[0]} and {found[1]} blocks, and this one has seed "
                f"{self.seed} and {len(self.blocks)}; make the LayerDrop as that run did."
            )
        self._returned = list(state["returned"])
        self.step = state["step"]

    def _mask(self, step: int) -> tuple[bool, ...]:
        draws = random.Random(f"{self.seed} {step}")  # from a text, whose hash leaves no pattern between steps
        return tuple(draws.random() < probability for probability in self.probabilities(step))

    def _draw(self) -> None:
        self._kept = self._mask(self._step)
        self._unchecked = {number for number, is_kept in enumerate(self._kept) if not is_kept}

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_stepped:
            mine = {id(parameter) for block in self.blocks for parameter in _parameters(block)}
            groups = optimizer.param_groups
            self._has_stepped = any(id(parameter) in mine for group in groups for parameter in group["params"])

    @no_frames_inside
    def decide(self, number: int) -> float:
        """Return by what a block's contribution is multiplied in the running forward; 0: the block is dropped.

        Raises:
            ZgraphError: the block cannot be dropped here; the message says why.
            AgreementError: options or steps differ between ranks.
        """
        if self._has_stepped and not is_in_backward():  # in backward, checkpointing repeats a forward of before
            self._step, self._has_stepped = self._step + 1, False
            self._draw()
        block = self.blocks[number]
        if (state := state_of(block)) is not None:
            self._check_scope(number, state.scope)
        if number in self._unchecked:
            self._unchecked.remove(number)
            if any(parameter.grad is not None for parameter in _parameters(block)):
                self.refuse(
                    number,
                    "is dropped in this step, and its parameters have a gradient of before, by which the optimizer "
                    "would move them. Call optimizer.zero_grad(), with set_to_none=True as by default, after each step",
                )
        return 1 / self.probabilities(self._step)[number] if self._kept[number] else 0.0

    def _check_scope(self, number: int, scope: Scope) -> None:
        if scope.handle_of is not None:
            instead = ', and compile the model: torch.compile(model, backend="zgraph")' if scope.context is None else ""
            self.refuse(
                number,
                "is in a step of zgraph.training_step, which would need a graph for each mask. Leave the decorator "
                f"out{instead}",
            )
        if scope.is_staged:
            self.refuse(
                number,
                "is in a stage of a pipeline, where its depth in the whole model is not known. Train with LayerDrop "
                "without pipeline stages",
            )
        if not self._is_agreed:
            self._is_agreed = True
            for place, other in enumerate(self.blocks):
                if (name := _gathered_around(other)) is not None:
                    self.refuse(
                        place,
                        f"lies inside a module named in zgraph.shard(units=...), which gathers and reduces {name} in "
                        "each step. Name the blocks themselves, or leave units out",
                    )
            options = (("theta", self.theta), ("gamma", self.gamma), ("seed", self.seed), ("step", self._step))
            for model in scope.models:
                model.meet("drawing layers by zgraph.LayerDrop", options)

    @no_frames_inside
    def returned(self, number: int, hidden: Tensor, result: Any) -> Tensor:
        """Return the hidden states in what a block has returned, and note what else it returns.

        Raises:
            ZgraphError: a dropped block could not return the same kind of thing.
        """
        items = result if isinstance(result, tuple) else (result,)
        found = items[0] if items else None
        if not isinstance(found, Tensor):
            self.refuse(number, f"returns a {type(result).__name__}; return hidden states, or a tuple that begins so")
        if (found.shape, found.dtype) != (hidden.shape, hidden.dtype):
            self.refuse(
                number,
                f"takes {list(hidden.shape)} {hidden.dtype} and returns {list(found.shape)} {found.dtype}, so its "
                "input cannot stand for its output. Leave it out of the blocks",
            )
        more = next((item for item in items[1:] if item is not None), None)
        if more is not None:
            self.refuse(
                number,
                f"returns a tuple with a {type(more).__name__} after the hidden states, which it could not return when "
                "it is dropped. Switch it off, as by output_attentions=False",
            )
        self._returned[number] = len(items) if isinstance(result, tuple) else 0
        return found

    @no_frames_inside
    def of_dropped(self, number: int, hidden: Tensor) -> Any:
        """Return what a dropped block returns: its input, in a tuple if the block returns one."""
        kind = type(self.blocks[number])
        alike = (seen for block, seen in zip(self.blocks, self._returned, strict=True) if type(block) is kind)
        items = next((seen for seen in (self._returned[number], *alike) if seen is not None), None)
        if items is None:
            self.refuse(
                number,
                "is dropped before it or a block of its class has run once, so what it returns is not known. Call "
                "drop.load_state_dict() with the state of the run that is resumed, or begin at step 0, which keeps all",
            )
        return (hidden, *[None] * (items - 1)) if items else hidden

    def refuse(self, number: int, why: str) -> NoReturn:
        raise ZgraphError(self.refusal(number, why))

    def refusal(self, number: int, why: str) -> str:
        return f"zgraph.LayerDrop: block {number} ({type(self.blocks[number]).__name__}) {why}."


def _parameters(block: nn.Module) -> Iterable[Tensor]:
    """Yield a block's parameters as they lie between forwards; `block.parameters()` gathers them inside one."""
    for part in block.modules():
        yield from (one for one in local_parameters(part).values() if one is not None)


def _gathered_around(block: nn.Module) -> str | None:
    """Return the name of a parameter that only this block reads and that a module around the block gathers, or None."""
    parts = [*block.modules()]
    states = [state for part in parts if (state := state_of(part)) is not None]
    inside = {id(param) for state in states for param in state.params}
    own = (param for state in states for param in state.by_attribute.values())
    private = (param for param in own if all(any(site is part for part in parts) for site, _ in param.sites))
    return next((param.name for param in private if id(param) not in inside), None)


@functools.cache
def dropping_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `base` whose call asks the `LayerDrop` of its instance; it has the name of `base`."""

    @never_a_frame
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        place: Place = self.__dict__[PLACE]
        if not self.training or not place.drop.drops:
            return base.__call__(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            _check_may_break(place)
        return _call_or_drop(base.__call__, self, place, args, kwargs)

    body: dict[str, Any] = {"__call__": call, "__module__": base.__module__, "__qualname__": base.__qualname__}
    sharded_from: type[nn.Module] | None = getattr(base, "_zgraph_base", None)
    if sharded_from is not None:  # zgraph.shard makes its class anew from this one, when it is called again
        body["_zgraph_base"] = dropping_class(sharded_from)
    return type(base.__name__, (base,), body)


@constant_in_graphs
def _check_may_break(place: Place) -> None:
    """Refuse a compiled model whose sequences are shared by ranks, where graphs must not break.

    Raises:
        ZgraphError: always in such a model.
    """
    drop, number = place
    block = drop.blocks[number]
    if (state := state_of(block)) is not None and state.scope.context is not None:
        raise_through_dynamo(
            drop.refusal(
                number,
                "is compiled in a model with a context axis, whose graphs must not break, as they do at blocks that "
                "may be dropped. Leave torch.compile out; or leave context out of zgraph.shard",
            ),
            ZgraphError,
        )


# Not traced: a mask in a graph would be one of 2^L constants.
@breaks_graphs
def _call_or_drop(
    call: Callable[..., Any], block: nn.Module, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    drop, number = place
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        drop.refuse(number, "is called without hidden states; pass them as its first argument")
    scale = drop.decide(number)
    if not scale:
        return drop.of_dropped(number, hidden)
    version = _version(hidden)
    if scale != 1 and args:
        # The block's own gradients of its input are added to each other first, as in the graph of a compiled block.
        args = (hidden.view_as(hidden), *args[1:])
    elif scale != 1:
        kwargs = {**kwargs, "hidden_states": hidden.view_as(hidden)}
    result = call(block, *args, **kwargs)
    found = drop.returned(number, hidden, result)
    if _version(hidden) != version:
        drop.refuse(number, "writes to its input, which dropping would return. Write x = x + y instead of x += y")
    if scale == 1:
        return result
    mixed = torch.lerp(hidden, found, scale)
    return (mixed, *result[1:]) if isinstance(result, tuple) else mixed


@no_frames_inside
def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
