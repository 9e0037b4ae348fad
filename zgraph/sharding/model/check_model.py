"""Refuse models whose parameters or buffers `shard` does not support."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zgraph.sharding.model.buffers import check_buffers, distinct_elements
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.memory import storage_key
from zgraph.torch_compat.modules import FLAT_WEIGHTS

SENT_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)


def check_model(module: nn.Module, found: Mapping[str, nn.Parameter], ignored: Container[int]) -> None:
    """Check that `shard` supports a model's parameters and buffers.

    Args:
        found: parameters to shard, by name.
        ignored: ids of parameters that are not sharded.

    Raises:
        ValueError: a tensor is not supported; the message names it and says what to do.
    """
    _check_kinds(found, ignored)
    _check_memory(found, module)
    _check_holders(found, module)
    check_buffers(module)


def _check_kinds(found: Mapping[str, nn.Parameter], ignored: Container[int]) -> None:
    """Check that every parameter can be split into rows and sent between ranks."""
    for name, parameter in found.items():
        if is_lazy(parameter):
            raise ValueError(
                f"zgraph.shard: {name} has no shape yet (a lazy module); run one forward of the model first, on a "
                "typical batch."
            )
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor) and not is_fake(parameter):
            raise ValueError(
                f"zgraph.shard: {name} is a {type(parameter).__name__}, a class of its own, and would lose that class "
                "and its behaviour as a DTensor. Make it an nn.Parameter (with torchao, leave "
                "enable_fsdp_float8_all_gather out of Float8LinearConfig, and quantize weights after training); or "
                "call zgraph.shard on the modules without it; to mark a parameter, set an attribute of it "
                f'({name}.kind = "..."), which zgraph.shard carries over.'
            )
        if parameter.layout != torch.strided or parameter.is_quantized:
            kind = "quantized" if parameter.is_quantized else f"of layout {parameter.layout}"
            raise ValueError(
                f"zgraph.shard: {name} is {kind}, and only dense parameters are sharded. Store its components "
                "(indices and values, or codes and scales) and build it in forward."
            )
        if parameter.dtype not in SENT_DTYPES and id(parameter) not in ignored:
            raise ValueError(
                f"zgraph.shard: {name} is a parameter of {parameter.dtype}, which not every backend sends. Register it "
                f"as a buffer, which stays whole; or name it in ignored=[...], so that each rank keeps its own values; "
                f"or store its bytes, {name}.view(torch.uint8), and view them as {parameter.dtype} in forward."
            )


def _check_memory(found: Mapping[str, nn.Parameter], module: nn.Module) -> None:
    """Refuse parameters that share elements with another parameter or with a buffer."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*found.items(), *module.named_buffers()):
        key = storage_key(tensor) if _has_memory(tensor) else None
        if key is not None:
            by_storage.setdefault(key, []).append((name, tensor))
    for sharing in by_storage.values():
        for (name, tensor), (other, twin) in combinations(sharing, 2):
            if name in found and _overlap(tensor, twin):
                what = "parameters" if other in found else "a parameter and a buffer"
                raise ValueError(
                    f"zgraph.shard: {name} and {other} are {what} with the same memory, which sharding would separate: "
                    "an update of one would no longer be seen in the other. Tie parameters by assigning the parameter "
                    "itself (a.weight = b.weight, not its .data), and make a view of a parameter in forward."
                )


def _check_holders(found: Mapping[str, nn.Parameter], module: nn.Module) -> None:
    """Check that no module also holds a parameter in a list, tuple or dict, where `shard` cannot replace it."""
    names = {id(parameter): name for name, parameter in found.items()}
    for prefix, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute in ("_parameters", "_buffers", "_modules", FLAT_WEIGHTS):
                continue
            held = next((names[id(one)] for one in _held(value) if id(one) in names), None)
            if held is not None:
                raise ValueError(
                    f"zgraph.shard: {'.'.join(filter(None, (prefix, attribute)))} holds the parameter {held} in a "
                    f"{type(value).__name__}, where it would stay unsharded, and a forward that reads it there would "
                    "not train it. Use nn.ParameterList or nn.ParameterDict, or read the module's attribute in forward."
                )


def _held(value: Any) -> Iterable[Tensor]:
    """Yield tensors in a container, or in containers directly inside it."""
    for one in _items(value):
        if isinstance(one, Tensor):
            yield one
        else:
            yield from (inner for inner in _items(one) if isinstance(inner, Tensor))


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _has_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two views of a storage have an element in common."""
    spans = [(view.storage_offset() * view.itemsize, _end(view) * view.itemsize) for view in (one, other)]
    begin, end = max(span[0] for span in spans), min(span[1] for span in spans)
    if begin >= end:
        return False
    if one.dtype != other.dtype:
        return True
    # Interleaved views, such as two columns of a matrix: mark the elements to find out.
    marked = torch.zeros(max(map(_end, (one, other))), dtype=torch.bool)
    marks = [marked.as_strided(view.shape, view.stride(), view.storage_offset()) for view in (one, other)]
    distinct_elements(marks[0]).fill_(True)
    return bool(marks[1].any())


def _end(view: Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return int(view.storage_offset() + reach + 1)
