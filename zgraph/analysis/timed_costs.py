"""A cost model that times each kernel on this machine instead of estimating it."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.fx.node import map_arg

from zgraph.analysis.cost import CostModel, NodeCost
from zgraph.analysis.hardware import Hardware
from zgraph.graph import meta, nodes, operator_arguments
from zgraph.runtime.handle import make_handle
from zgraph.runtime.window_state import attach_state
from zgraph.tiers.lanes import COMPUTE, HOST_UPDATES
from zgraph.torch_compat.fake_values import hint_of, without_fake_mode
from zgraph.torch_compat.groups import default_store, is_distributed_ready, is_fake_world
from zgraph.torch_compat.operators import arguments_by_name

_ENOUGH_US = 2_000.0  # total time for which one kernel is repeated
_MOST_CALLS = 50
# Namespaces whose operators neither communicate nor keep state; others may.
_HARMLESS = ("aten", "prims")


class TimedCosts(CostModel):
    """A `CostModel` that times compute and host updates; collectives and copies between devices are estimated.

    Operators run as in eager mode, on random values of the right shapes; fused kernels would be faster. Each operator
    is timed once for each set of sizes, by the first rank that needs it. The store of the default group shares the time
    with the other ranks, so that all make the same plan. Operators that cannot be run are estimated, and so are
    operators of other libraries, because they may communicate.

    Args:
        hardware: this machine, as measured by `zgraph.calibrate`.
        store: store through which ranks share times; None: the default group's, if there is one.
    """

    def __init__(self, hardware: Hardware, store: Store | None = None) -> None:
        super().__init__(hardware)
        if store is None and is_distributed_ready() and not is_fake_world():
            store = default_store()
        self.store = PrefixStore("zgraph/timed_costs", store) if store is not None else None

    def _local(self, node: fx.Node) -> NodeCost:
        estimate = super()._local(node)
        if estimate.lane not in (COMPUTE, HOST_UPDATES) or not _can_run(node):
            return estimate
        return replace(estimate, us=self._agreed_us(node, estimate.us))

    def _agreed_us(self, node: fx.Node, estimate_us: float) -> float:
        if self.store is None:
            return _timed_us(node, estimate_us)
        key = hashlib.sha256(repr(_described(node)).encode()).hexdigest()
        if not self.store.check([key]):
            self.store.compare_set(key, "", repr(_timed_us(node, estimate_us)))  # the first rank's time stays
        return float(self.store.get(key))


def _described(node: fx.Node) -> tuple[str, Any]:
    """Return everything that the time of a call depends on, without rank numbers: equal on all ranks."""
    named = arguments_by_name(node)
    own: tuple[str, ...] = ()
    if nodes.is_quantize(node) or nodes.is_dequantize_sum(node):
        own = ("rank", "salt")
    elif nodes.is_low_rank(node):
        own = ("first_rows",)
    named = {name: value for name, value in named.items() if name not in own}
    return str(node.target), map_arg(named, lambda source: _shape(meta.value(source)))


def _can_run(node: fx.Node) -> bool:
    is_ours = nodes.is_sum_ranks(node) or nodes.is_quantize(node) or nodes.is_dequantize_sum(node)
    is_ours = is_ours or nodes.is_low_rank(node)
    return is_ours or getattr(node.target, "namespace", "") in _HARMLESS


def _timed_us(node: fx.Node, estimate_us: float) -> float:
    try:
        with without_fake_mode(), torch.no_grad(), _random_state_kept():
            return _median_us(_call(node))
    except Exception:  # an operator that rejects random values: keep the estimate
        return estimate_us


def _random_state_kept() -> AbstractContextManager[None]:
    """Return a context that restores the random state of the CPU and of this rank's device.

    Other devices are left out, because torch would warn if the context covered all of them.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[torch.accelerator.current_device_index()], device_type=device.type)


def _call(node: fx.Node) -> Callable[[], object]:
    """Return a function that calls a node's operator on random values."""
    made: dict[fx.Node, Any] = {}
    if nodes.is_quantize(node):
        made |= {handle: _new_handle() for handle in operator_arguments.QuantizeArgs.of(node).handles}

    if nodes.is_low_rank(node):
        made |= {handle: _new_handle() for handle in operator_arguments.LowRankArgs.of(node).handles}

    def real(source: fx.Node) -> Any:
        if source not in made:
            made[source] = _like(_shape(meta.value(source)))
        return made[source]

    args, kwargs = map_arg((node.args, node.kwargs), real)
    target = cast("Callable[..., object]", node.target)
    return lambda: target(*args, **kwargs)


def _new_handle() -> Tensor:
    """Return a new parameter handle with empty state, for operators that keep state; both are freed together."""
    handle = make_handle("")
    attach_state(handle, nn.Module(), "")
    return handle


@dataclass(frozen=True)
class _Shape:
    """Sizes, strides, dtype and device of a tensor argument, on which a kernel's time depends."""

    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device


def _shape(fake: Any) -> Any:
    if isinstance(fake, tuple | list):
        return tuple(map(_shape, cast("list[Any]", fake)))
    if not isinstance(fake, Tensor):
        return hint_of(fake) if isinstance(fake, torch.SymInt) else fake
    sizes, strides = (tuple(map(hint_of, sequence)) for sequence in (fake.shape, fake.stride()))
    return _Shape(sizes, strides, fake.dtype, fake.device)


def _like(shape: Any) -> Any:
    if isinstance(shape, tuple):
        return [_like(part) for part in cast("tuple[Any, ...]", shape)]
    if not isinstance(shape, _Shape):
        return shape
    sizes, strides = cast("tuple[int, ...]", shape.sizes), cast("tuple[int, ...]", shape.strides)
    real = torch.empty_strided(sizes, strides, dtype=shape.dtype, device=shape.device)
    # Indices and masks: zeros are valid in any table. Values: never denormal, on which CPUs are slow.
    return real.uniform_(0.5, 1.5) if real.is_floating_point() else real.zero_()


def _median_us(run: Callable[[], object]) -> float:
    run()
    first = _timed(run, 1)
    calls = max(1, min(_MOST_CALLS, int(_ENOUGH_US / 3 / max(first, 1.0))))
    return statistics.median(_timed(run, calls) for _ in range(3))


def _timed(run: Callable[[], object], calls: int) -> float:
    """Return the microseconds per call, averaged over consecutive calls."""
    _settle()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    _settle()
    return 1e6 * (time.perf_counter() - started) / calls


def _settle() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
