"""The key of a saved plan: a digest of everything that the plan of a frame depends on.

The key covers the frame's graph before AOTAutograd traces it, or that of a whole step; the inputs' layouts; torch's
modes and flags; the passes with their options; groups of ranks; and the code of torch and zgraph. What cannot be
written down reliably, such as a function of the user's that AOTAutograd would trace, has no key: such a frame is
compiled each time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodDescriptorType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from zgraph.graph import meta
from zgraph.runtime.groups import OF_GATHERS, OF_REDUCTIONS, rank_and_world
from zgraph.torch_compat.aot import compile_settings
from zgraph.torch_compat.fake_values import fake_storage_key, is_fake, number_parts, without_fake_mode
from zgraph.torch_compat.groups import backend_of, find_group
from zgraph.torch_compat.inductor import overridden_decomposition
from zgraph.torch_compat.operators import OpOverload, is_higher_order, is_of_torch, overridden_operator

_NAMESPACES = ("_c10d_functional", "aten", "c10d_functional", "prim", "prims", "zgraph")
_PACKAGES = ("torch", "_operator", "builtins", "math", "zgraph")
_LARGEST_CONSTANT = 1 << 20  # bytes; larger ones are not worth reading at each start
_PLAIN = str | bytes | bool | int | float | complex | Enum | None
_NAMED = torch.dtype | torch.device | torch.layout | torch.memory_format | slice | range | type(...)


class NotKeyed(Exception):
    """A frame depends on something that cannot be written into a key; the text says on what."""


def key_of(gm: fx.GraphModule, inputs: Sequence[Any], facts: Mapping[str, object]) -> str:
    """Return the key of a frame's plan.

    Args:
        gm: graph of the frame.
        inputs: example inputs of the graph.
        facts: what the plan depends on besides the graph, by name: options, passes, names of parameters.

    Raises:
        NotKeyed: the frame has no key.
    """
    digest = hashlib.sha256()
    for line in _lines(gm, inputs, facts):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _lines(gm: fx.GraphModule, inputs: Sequence[Any], facts: Mapping[str, object]) -> Iterator[str]:
    yield from _installed()
    yield from _settings()
    if facts.get("lowering") == "inductor" and (operator := overridden_decomposition()):
        raise NotKeyed(f"the operator {operator}, which other code than torch's decomposes")
    write = _Writer()
    for name, fact in facts.items():
        yield f"{name} {write.text(fact)}"
    yield from (write.layout(value) for value in inputs)
    yield from write.lines_of(gm)
    yield from map(_group_line, write.groups)


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return lines that identify the installed code: Python's, torch's, and every file of zgraph."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for room in (root, root / "passes", root / "codegen"):  # the latter two may be links
        for file in sorted(room.rglob("*.py")):
            digest.update(str(file.relative_to(room)).encode() + b"\0" + file.read_bytes())
    python = f"python {platform.python_version()} {platform.machine()}"
    return python, f"torch {torch.__version__} {torch.version.git_version}", f"zgraph {digest.hexdigest()}"


def _settings() -> Iterator[str]:
    """Yield lines with the modes and flags of torch that tracing, partitioning or planning depends on."""
    for kind in ("cpu", "cuda"):
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        yield f"autocast {kind} {enabled} {dtype} {torch.is_autocast_cache_enabled()}"
    yield f"rank {rank_and_world()} on {torch.get_default_device()}"
    yield f"modes {torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {torch.get_default_dtype()}"
    exact = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield f"arithmetic {exact} {torch.get_float32_matmul_precision()} {torch.get_num_threads()}"
    cuda = torch.backends.cuda
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    yield f"attention {attention} {cuda.cudnn_sdp_enabled()} {torch.backends.mkldnn.enabled}"
    yield f"convolutions {torch.backends.cudnn.enabled} {torch.backends.cudnn.deterministic}"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield f"GPU {torch.cuda.get_device_name()} {torch.version.cuda}"
    yield f"contractions {torch.backends.opt_einsum.is_available()} {torch.backends.opt_einsum.strategy}"
    if (settings := compile_settings()) is None:
        raise NotKeyed("passes of torch that the user has added")
    yield settings
    if operator := overridden_operator():
        raise NotKeyed(f"the operator {operator}, which other code than torch's implements")


class _Writer:
    """Writes values as text: the same in every process, and different for different values.

    Attributes:
        groups: names of process groups among the texts written so far.
    """

    def __init__(self) -> None:
        self.groups: dict[str, None] = {}
        self._storages: dict[int, int] = {}

    def lines_of(self, gm: fx.GraphModule) -> Iterator[str]:
        """Yield lines for each node of a graph, and of the graphs that it calls."""
        if any(name.startswith("saved_tensors_hooks") for name, _ in gm.named_children()):
            raise NotKeyed("hooks of saved tensors")
        if gm.meta.get("_checkpoint_context_fn") is not None:
            raise NotKeyed("a context_fn of activation checkpointing")
        numbers: dict[fx.Node, str] = {}
        for number, node in enumerate(gm.graph.nodes):
            numbers[node] = f"%{number}"
            if node.op != "placeholder":  # which is in the key as an input
                target = "" if node.op == "output" else _target(node)
                yield f"{node.op} {target} {self.text(node.args, numbers)} {self.text(node.kwargs, numbers)}"
            yield f"{self.text(meta.tags(node))} {self.text(node.meta.get('custom'))} {_origin(node)!r}"
            if node.op == "get_attr":
                yield from self._attribute_lines(gm, str(node.target))
            elif node.op == "call_module":
                raise NotKeyed(f"the module {node.target}")

    def _attribute_lines(self, gm: fx.GraphModule, name: str) -> Iterator[str]:
        value: Any = functools.reduce(getattr, name.split("."), gm)
        if isinstance(value, fx.GraphModule):
            yield f"graph {name}"
            yield from self.lines_of(value)
            yield "end"
            return
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or is_fake(value):
            raise NotKeyed(f"an attribute of type {type(value).__name__}")
        if value.device.type != "cpu" or value.numel() * value.element_size() > _LARGEST_CONSTANT:
            raise NotKeyed("a large constant")
        with without_fake_mode(), torch.no_grad():
            content = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
            yield f"{self.layout(value)} {bytes(content.tolist()).hex()}"

    def layout(self, value: object) -> str:
        """Return the layout of an input in one line; inputs on one storage have its number in common."""
        if not isinstance(value, Tensor):
            return self.text(value)
        if not (is_fake(value) or type(value) in (Tensor, nn.Parameter)):
            raise NotKeyed(f"an input of type {type(value).__name__}")
        if any(isinstance(size, torch.SymInt) for size in value.shape) or value.layout != torch.strided:
            raise NotKeyed("symbolic sizes")
        storage = self._storages.setdefault(fake_storage_key(value), len(self._storages))
        return (
            f"{storage} {value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()} {value.device} "
            f"{value.requires_grad} {value.is_leaf} {value.is_inference()} {value.is_conj()} {value.is_neg()}"
        )

    def text(self, value: object, numbers: Mapping[fx.Node, str] = MappingProxyType({})) -> str:
        """Return a value as text.

        Args:
            value: the value.
            numbers: texts of the nodes in it.
        """
        if isinstance(value, fx.Node):
            return numbers[value]
        if isinstance(value, str) and value and find_group(value) is not None:
            self.groups[value] = None
        if isinstance(value, _PLAIN | _NAMED):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.Size | tuple | list):
            return f"{type(value).__name__}[{', '.join(self.text(one, numbers) for one in value)}]"
        if isinstance(value, Mapping):
            pairs = (f"{self.text(key)}: {self.text(one, numbers)}" for key, one in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, frozenset | set):
            return f"set[{', '.join(sorted(self.text(one) for one in value))}]"
        if isinstance(value, torch.SymFloat):  # a number that a step reads, such as a learning rate
            return f"number {number_parts(value)[0]}"
        if isinstance(value, torch.SymInt | torch.SymBool):
            raise NotKeyed("symbolic sizes")
        if isinstance(value, OpOverload):
            return _operator(value)
        if isinstance(value, FunctionType | BuiltinFunctionType | MethodDescriptorType | type):
            return _function(value)
        if dataclasses.is_dataclass(value) and type(value).__module__.partition(".")[0] == "zgraph":
            fields = [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value) if one.init]
            content = ", ".join(f"{name}={self.text(one)}" for name, one in fields)
            return f"{type(value).__module__}.{type(value).__qualname__}({content})"
        raise NotKeyed(f"a value of type {type(value).__qualname__}")


def _origin(node: fx.Node) -> str:
    """Return the modules and lines of code that a node comes from, which reports show."""
    stack = node.meta.get("nn_module_stack") or {}
    return f"{[str(entry[0]) for entry in stack.values()]} {node.meta.get('stack_trace')}"


def _target(node: fx.Node) -> str:
    """Return the name of what a node calls, if it is torch's or zgraph's."""
    target: Any = node.target
    if node.op == "call_method":  # of a tensor: other inputs have no key
        if target == "item":  # such as a float that changes: torch may make it a constant, and trace the frame again
            raise NotKeyed("a number that it reads")
        method = getattr(Tensor, str(target), None)
        if method is None or not (isinstance(method, MethodDescriptorType) or is_of_torch(method)):
            raise NotKeyed(f"the method {target}")
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return _operator(target)
    if is_higher_order(target):
        if "triton" in str(target):  # its kernel is in a table of torch's
            raise NotKeyed(f"the operator {target}")
        return str(target)
    return _function(target)


def _operator(operator: OpOverload) -> str:
    if operator.namespace not in _NAMESPACES:
        raise NotKeyed(f"the operator {operator}")  # its formulas are the user's
    return str(operator)


def _function(function: Any) -> str:
    if not isinstance(function, FunctionType | BuiltinFunctionType | MethodDescriptorType | type):
        raise NotKeyed(f"a {type(function).__name__} that the graph calls")
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__qualname__", "")
    owner = getattr(function, "__self__", None) or getattr(function, "__objclass__", None)
    if not module and owner is not None:
        module = getattr(owner, "__module__", None) or getattr(owner, "__name__", "")
    if str(module).partition(".")[0] not in _PACKAGES or "<" in name or not is_of_torch(function):
        raise NotKeyed(f"the function {module}.{name}")
    return f"{module}.{name}"


def _group_line(name: str) -> str:
    """Return a group's members and backends, and whether its siblings exist."""
    group = find_group(name)
    assert group is not None
    siblings = [suffix for suffix in (OF_REDUCTIONS, OF_GATHERS) if find_group(name + suffix) is not None]
    backends = [backend_of(group, torch.device(kind)) for kind in ("cpu", "cuda")]
    return f"group {name} {dist.get_process_group_ranks(group)} {backends} {siblings}"
