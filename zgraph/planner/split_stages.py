"""`zgraph.split_stages`: cuts a sequence of layers into pipeline stages of about equal time."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.analysis.cost import CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.errors import check_kind, is_count
from zgraph.planner.schedules.layer_time import layer_time, likeness
from zgraph.torch_compat.fake_values import fake_mode, fake_mode_of, fake_on_cpu


def split_stages(
    model: nn.Module | Sequence[nn.Module],
    stages: int,
    *,
    batch: Callable[[], tuple[Any, ...]],
    hardware: Hardware | str = "h100",
) -> list[nn.Sequential]:
    """Cut a sequence of layers into stages such that the slowest stage takes as little time as possible.

    The time of each layer's forward and backward is predicted from a trace on fake tensors; equal layers are traced
    once. Among cuts with the same slowest time, the most even one is chosen; among equally even cuts, the one with the
    shortest early stages, because early stages keep the activations of most micro-batches.

        chunks = zgraph.split_stages(nn.Sequential(embed, *blocks, head), 4, batch=lambda: (tokens,))
        stage = zgraph.PipelineStage(chunks[rank], rank, 4, device)

    Args:
        model: an `nn.Sequential`, or a list of modules, each called with the single tensor that the previous one
            returns. On any device, also "meta"; not yet parallelized or sharded.
        stages: number of stages.
        batch: returns the arguments of the first layer for one micro-batch: one tensor in a tuple.
        hardware: hardware of each rank, or the name of a preset.

    Returns:
        The stages. Layers of an `nn.Sequential` keep their names.

    Raises:
        ValueError: the model is not such a sequence, there are fewer layers than stages, or batch is not a function
            that returns one argument.
    """
    layers = _layers(model)
    if not is_count(stages):
        raise ValueError(f"zgraph.split_stages: stages={stages!r}; write a number from 1 on.")
    if stages > len(layers):
        raise ValueError(
            f"zgraph.split_stages: {len(layers)} layers cannot make {stages} stages; use fewer stages, or list the "
            "model's layers one by one."
        )
    machine = Hardware.preset(hardware) if isinstance(hardware, str) else hardware
    times_us = _times_us(layers, batch, machine)
    # Whole nanoseconds: sums of equal layers are equal in any order of addition.
    cuts = even_cuts([round(1000 * us) for us in times_us], stages)
    return [nn.Sequential(OrderedDict(layers[begin:end])) for begin, end in itertools.pairwise(cuts)]


def even_cuts(times: Sequence[int], stages: int) -> list[int]:
    """Return the index of the first item of each stage, followed by the number of items.

    No stage is empty. The cuts minimize the time of the slowest stage, then the sum of the squares of all stages'
    times, then the times of early stages.

    Args:
        times: time of each item.
        stages: number of stages, at most the number of items.
    """
    until = [0, *itertools.accumulate(times)]
    count = len(times)

    def best(stages_left: int, cost: Callable[[int, int], Any], join: Callable[[Any, Any], Any]) -> list[list[Any]]:
        """Return a table whose entry [n][i] is the least cost of the items from i on, cut into n stages."""
        found: list[list[Any]] = [[None] * (count + 1) for _ in range(stages_left + 1)]
        found[0][count] = 0
        for number in range(1, stages_left + 1):
            for begin in range(count - number, -1, -1):
                options = [
                    join(cost(begin, end), found[number - 1][end])
                    for end in range(begin + 1, count + 1)
                    if found[number - 1][end] is not None and cost(begin, end) is not None
                ]
                found[number][begin] = min(options, default=None)
        return found

    slowest = best(stages, lambda begin, end: until[end] - until[begin], max)[stages][0]

    def square(begin: int, end: int) -> int | None:
        took = until[end] - until[begin]
        return took * took if took <= slowest else None

    squares = best(stages, square, lambda first, rest: first + rest)
    cuts = [0]
    for number in range(stages, 0, -1):
        begin = cuts[-1]
        cuts.append(
            next(  # the shortest stage that is as good
                end
                for end in range(begin + 1, count + 1)
                if (own := square(begin, end)) is not None
                and (rest := squares[number - 1][end]) is not None
                and own + rest == squares[number][begin]
            )
        )
    return cuts


def _layers(model: nn.Module | Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the layers by name, in the order in which they run."""
    if isinstance(model, nn.Module):
        is_sequence = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if not (is_sequence or isinstance(model, nn.ModuleList)):
            raise ValueError(
                f"zgraph.split_stages: a {type(model).__name__} cannot be cut, since its forward can be anything; pass "
                "an nn.Sequential, or a list of modules, each called with the result of the previous one."
            )
        named = [name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name]
        layers = [(name, model.get_submodule(name)) for name in named]
    else:
        layers = [(str(place), layer) for place, layer in enumerate(model)]
    for name, layer in layers:
        if not isinstance(layer, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"zgraph.split_stages: layer {name} is a {type(layer).__name__}, not an nn.Module.")
        for parameter, value in layer.named_parameters():
            if isinstance(value, DTensor):
                raise ValueError(
                    f"zgraph.split_stages: {parameter} of layer {name} is a DTensor; split first, then parallelize and "
                    "shard each stage."
                )
    return layers


def _times_us(
    layers: Sequence[tuple[str, nn.Module]], batch: Callable[[], tuple[Any, ...]], machine: Hardware
) -> list[float]:
    example = "lambda: (torch.zeros(8, 1024),)"
    instead = f"pass a function that returns the tuple of the first layer's arguments, such as {example}"
    check_kind("zgraph.split_stages: batch", batch, Callable, instead)
    values = [value for _, layer in layers for value in (*layer.parameters(), *layer.buffers())]
    mode = fake_mode_of(values) or fake_mode()
    with mode:
        given = batch()
    if not isinstance(given, tuple | list) or len(given) != 1 or not isinstance(given[0], Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"zgraph.split_stages: batch returned {_kinds(given)}; return one tensor in a tuple, such as (tokens,), "
            "since each layer of a sequence takes one."
        )
    argument = fake_on_cpu(mode, given[0])
    costs = CostModel(machine)
    known: dict[Any, tuple[float, Tensor | None]] = {}
    times: list[float] = []
    for name, layer in layers:
        key = likeness(layer, [argument])
        if key not in known:
            known[key] = layer_time(layer, [argument], mode, costs)
        us, returned = known[key]
        if returned is None:
            raise ValueError(
                f"zgraph.split_stages: layer {name}, a {type(layer).__name__}, does not return one tensor; wrap it "
                "in a module that does."
            )
        times.append(us)
        argument = returned
    return times


def _kinds(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(type(one).__name__ for one in value)})"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return f"a {type(value).__name__}"
