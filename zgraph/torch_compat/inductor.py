"""Inductor: its decompositions, its compiler for islands (compiled subgraphs), and its C++ toolchain."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph.torch_compat import release_of
from zgraph.torch_compat.fake_values import fake_mode_of, without_fake_mode


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, except that random operators draw as in eager torch (2.11 - 2.15)."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        table: dict[Any, Callable[..., Any]] = select_decomp_table()
    if release_of(torch.__version__) < (2, 12):
        table = {**table, torch.ops.aten.lerp.Scalar: _lerp, torch.ops.aten.lerp_.Scalar: _lerp_in_place}
    return table


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Decompose `torch.lerp` with a number as weight as torch 2.12 does, so that one graph serves any weight.

    2.11 first turns the weight into a tensor (`aten.full`), and Inductor makes the tensor's value a constant.
    """
    if weight >= 0.5 or weight <= -0.5:
        return torch.add(end, end - start, alpha=weight - 1.0)
    return torch.add(start, end - start, alpha=weight)


def _lerp_in_place(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start.copy_(_lerp(start, end, weight))


@functools.cache
def _attention_patterns(device: torch.device) -> Any:
    """Inductor's patterns of hand-written attention, without the other patterns of `joint_graph.patterns`."""
    from torch._guards import tracing
    from torch._inductor.fx_passes.fuse_attention import _get_sfdp_patterns
    from torch._inductor.pattern_matcher import PatternMatcherPass, gen_register_replacement
    from torch._subclasses.fake_tensor import FakeTensorMode

    patterns = PatternMatcherPass(pass_name="fuse_attention")
    with tracing(None), without_fake_mode(), FakeTensorMode():  # for the patterns' example inputs
        for name, described in _get_sfdp_patterns(device):
            given: dict[str, Any] = {**described, "pass_dicts": patterns}
            gen_register_replacement(name, **given)
    return patterns


def fuse_attention(gm: fx.GraphModule, device: torch.device) -> int:
    """Replace hand-written attention in a joint graph by `scaled_dot_product_attention` (2.11 - 2.15).

    As in Inductor's joint-graph passes, a pattern matches forward and backward together. Patterns describe graphs
    without no-op views and copies, so these are removed first, even if no pattern matches.

    Args:
        gm: joint graph, decomposed by `inductor_decompositions`; changed in place. Afterwards new nodes may be placed
            before their inputs, and users of new nodes may have been traced with other strides.
        device: device of the attention.

    Returns:
        Number of replacements.
    """
    from torch._inductor.fx_passes.joint_graph import early_patterns
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    remove_noop_ops(gm.graph)
    early_patterns.apply(gm)
    return _attention_patterns(device).apply(gm)


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Compile a functional aten graph that returns a tuple, during a Dynamo compile (compile_fx_inner, 2.11 - 2.15).

    Args:
        gm: the graph; its outputs keep the strides in `meta["val"]`.
        inputs: fake values of the graph's placeholders.

    Returns:
        A function of one list of inputs; a call empties the list.
    """
    from torch._guards import TracingContext
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    returned = next(iter(reversed(gm.graph.nodes)))
    returned.meta["user_visible_output_idxs"] = list(range(len(returned.args[0])))
    context = TracingContext.try_get()
    strides = None if context is None else context.output_strides
    if context is not None:
        context.output_strides = None  # AOTAutograd would mistake the island's strides for its own graph's
    try:
        with V.set_fake_mode(fake_mode_of(inputs)), config.patch(dict(_ISLAND_OPTIONS)):
            return cast("Callable[[list[Any]], Any]", compile_fx_inner(gm, list(inputs)))
    finally:
        if context is not None:
            context.output_strides = strides


# Overrides of options that a user may have set for whole programs but that are wrong or useless for an island:
# - random operators draw as in eager torch;
# - a CUDA graph for each island would copy its inputs, keep its outputs in a pool of its own, and be captured again for
#   each set of addresses, which change every step for the outputs of collectives;
# - users outside the island were traced with its outputs' unpadded strides.
# max_autotune and the like may stay: they choose kernels, by measurements on this rank, and change no order.
_ISLAND_OPTIONS = MappingProxyType({"fallback_random": True, "triton.cudagraphs": False, "pad_outputs": False})


def load_cpp(source: str) -> ctypes.CDLL:
    """Compile C++ source without torch headers by Inductor's toolchain, and load the library.

    The library is kept in Inductor's cache directory under a key of source, command line and processor, so that it is
    compiled once per machine; concurrent processes wait for the first one. Arithmetic follows IEEE: no multiplication
    is contracted with an addition, and nothing is assumed about NaNs, signed zeros or the order of sums.

    Has run on 2.11 - 2.15 (`cpp_builder`, `codecache.write`, `torch.utils._filelock`). Inductor's compiler options
    (`CppOptions`) are not used, because they turn off the vectorization of loops.

    Raises:
        RuntimeError: a compiler was not found, or rejected the source.
        OSError: the cache directory cannot be written to, or libraries in it cannot be loaded.
    """
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir, write
    from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder, get_cpp_compiler
    from torch.utils._filelock import FileLock

    if sys.platform == "win32":
        raise RuntimeError("the kernels are written for g++ and clang++, which Windows does not use")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [
        "O3",
        *(["march=native"] if x86 else ["mcpu=native"]),
        "std=c++17",
        "shared",
        "fPIC",
        "ffp-contract=off",
        "fno-math-errno",
        "fno-trapping-math",
        *(["fopenmp"] if sys.platform == "linux" else []),
    ]
    options = BuildOptionsBase(compiler=get_cpp_compiler(), cflags=flags)
    command = CppBuilder("o", "i", options).get_command_line()
    key, path = write(source, "cpp", extra=f"{command} {_processor()}")
    library = os.path.join(os.path.dirname(path), f"{key}.so")
    with FileLock(os.path.join(get_lock_dir(), f"{key}.lock"), timeout=LOCK_TIMEOUT):
        if not os.path.exists(library):
            # First under a temporary name: a process that is killed leaves no file that looks complete.
            builder = CppBuilder(f"{key}.{os.getpid()}", path, options, output_dir=os.path.dirname(path))
            builder.build()
            os.replace(builder.get_target_file_path(), library)
    return ctypes.CDLL(library)


def _processor() -> str:
    """Text of this processor's kind and features, on which code compiled with "native" depends."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.partition("\t")[0].strip(" :") in kept)


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor calls; None if it finds none (`get_cpp_compiler`, 2.11 - 2.15)."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except RuntimeError:  # InvalidCxxCompiler, or others on Windows
        return None


def inductor_cache_directory() -> str:
    """Inductor's cache directory, which may not exist yet (`default_cache_dir`, 2.11 - 2.15)."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def cpu_features() -> dict[str, bool]:
    """Features of this processor by name, such as "avx512_f" and "avx512_bf16"; empty if torch reports none.

    `torch.cpu.get_capabilities` is public (2.11 - 2.15).
    """
    found: Any = torch.cpu.get_capabilities()
    return {name: value for name, value in dict(found).items() if isinstance(value, bool)}
