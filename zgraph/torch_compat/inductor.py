"""Access to Inductor: decompositions, compilation of subgraphs, and the C++ toolchain."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
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
from zgraph.torch_compat.operators import is_of_torch


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions, with two differences (torch 2.11 - 2.15).

    Random operators draw as in eager mode. The gradient of a loss over classes compares instead of scattering.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        table: dict[Any, Callable[..., Any]] = {**select_decomp_table()}
    for operator in (torch.ops.aten.nll_loss_backward.default, torch.ops.aten.nll_loss2d_backward.default):
        table[operator] = functools.partial(_nll_loss_backward, table[operator])
    if release_of(torch.__version__) < (2, 12):
        table = {**table, torch.ops.aten.lerp.Scalar: _lerp, torch.ops.aten.lerp_.Scalar: _lerp_in_place}
    return table


def overridden_decomposition() -> str:
    """Return an operator that `inductor_decompositions` decomposes by other code than torch's; "" if there is none."""
    table = inductor_decompositions()
    return next((str(operator) for operator, function in table.items() if not is_of_torch(function)), "")


def graphs_from_cache() -> int:
    """Return how many graphs Inductor has found compiled in its cache so far (torch 2.11 - 2.15: `counters`)."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"]


def _nll_loss_backward(
    by_torch: Callable[..., Tensor],
    grad: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Decompose the gradient of `nll_loss` into a comparison with the target, which Inductor fuses with its reader.

    torch's decomposition scatters -1 into zeros: an fp32 tensor as large as the scores, 1.5 GiB for 8,192 tokens and
    50,304 classes. `torch.compile` removes it by a pattern for joint graphs. The bits are the same.

    Args:
        by_torch: torch's decomposition, used for scores without a batch.
        grad, scores, target, weight, reduction, ignore_index, total_weight: as for the operator; scores are
            [batch, classes, ...], and reduction 1 is the mean.
    """
    if scores.dim() < 2:
        return by_torch(grad, scores, target, weight, reduction, ignore_index, total_weight)
    along_classes = [-1 if axis == 1 else 1 for axis in range(scores.dim())]
    classes = torch.arange(scores.shape[1], device=scores.device).view(along_classes)
    kept = (target != ignore_index).unsqueeze(1)
    chosen = torch.where(kept, target.unsqueeze(1), 0) == classes
    if reduction == 1:
        grad = grad / total_weight
    if grad.dim() > 0:
        grad = grad.unsqueeze(1)
    if weight is not None:
        grad = grad * weight.view(along_classes)
    return torch.where(chosen, scores.new_full((), -1.0), scores.new_zeros(())) * torch.where(kept, grad, 0)


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Decompose `torch.lerp` whose weight is a number, as torch 2.12 does, so that one graph works for any weight.

    torch 2.11 would make the weight a constant tensor of the graph.
    """
    if weight >= 0.5 or weight <= -0.5:
        return torch.add(end, end - start, alpha=weight - 1.0)
    return torch.add(start, end - start, alpha=weight)


def _lerp_in_place(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start.copy_(_lerp(start, end, weight))


@functools.cache
def _attention_patterns(device: torch.device) -> Any:
    """Return Inductor's patterns for fusing attention, without its other patterns for joint graphs."""
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
    """Replace attention written out in basic operators by `scaled_dot_product_attention` (torch 2.11 - 2.15).

    As in Inductor, each pattern matches forward and backward together. No-op views and copies are removed first,
    because patterns do not contain them; this happens even if no pattern matches.

    Args:
        gm: joint graph, decomposed by `inductor_decompositions`; changed in place. Afterwards, new nodes may come
            before their inputs, and users of new nodes may have wrong strides in their metadata.
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
    """Compile a functional aten graph with Inductor (torch 2.11 - 2.15: `compile_fx_inner`).

    Args:
        gm: graph that returns a tuple; its outputs keep the strides in `meta["val"]`.
        inputs: fake values of the graph's placeholders.

    Returns:
        A function that takes one list of inputs and empties it.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    returned = next(iter(reversed(gm.graph.nodes)))
    returned.meta["user_visible_output_idxs"] = list(range(len(returned.args[0])))
    mode = fake_mode_of(inputs)
    outer = TracingContext.try_get()
    context = outer or TracingContext(mode)  # Inductor's cache needs one, for the shapes' environment in it
    strides = context.output_strides
    context.output_strides = None  # AOTAutograd would mistake the island's strides for its own graph's
    try:
        with (
            contextlib.nullcontext() if outer else tracing(context),
            V.set_fake_mode(mode),
            config.patch(dict(_ISLAND_OPTIONS)),
        ):
            return cast("Callable[[list[Any]], Any]", compile_fx_inner(gm, list(inputs)))
    finally:
        context.output_strides = strides


# Overrides of options that a user may have set for whole programs but that are wrong or useless for an island:
# - random operators draw as in eager torch;
# - a CUDA graph for each island would copy its inputs, keep its outputs in a pool of its own, and be captured again for
#   each set of addresses, which change every step for the outputs of collectives;
# - users outside the island were traced with its outputs' unpadded strides.
# max_autotune and the like may stay: they choose kernels, by measurements on this rank, and change no order.
_ISLAND_OPTIONS = MappingProxyType({"fallback_random": True, "triton.cudagraphs": False, "pad_outputs": False})


def caches_graphs() -> bool:
    """Return whether Inductor keeps compiled graphs on disk (torch 2.11 - 2.15: its config)."""
    from torch._inductor import config

    return bool(config.fx_graph_cache and not config.force_disable_caches)


def chooses_by_measurement() -> bool:
    """Return whether the user lets Inductor choose kernels by their measured times (torch 2.11 - 2.15: its config)."""
    from torch._inductor import config

    names = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
    return any(getattr(config, name) for name in names)


def portable_settings() -> dict[str, Any] | None:
    """Return the settings of this process that Inductor's code depends on, for `adopt_settings` in another process.

    None if code of the user's is among Inductor's options. torch 2.11 - 2.15: `save_config_portable`, `get_hash`.
    """
    from torch._inductor import config

    options: dict[str, Any] = config.save_config_portable(ignore_private_configs=False)  # pyright: ignore
    if options.get("inductor_choices_class") is not None or any(map(callable, options.values())):
        return None
    return {
        "options": options,
        "hash": config.get_hash(),  # pyright: ignore[reportAttributeAccessIssue]
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": _of_determinism().fill_uninitialized_memory,
        "mkldnn": torch.backends.mkldnn.enabled,
        "precision": tuple(one.fp32_precision for one in _of_matmuls()),
        "cuda": _cuda_settings(),
    }


def adopt_settings(settings: dict[str, Any]) -> None:
    """Make the settings of another process those of this one; Inductor compiles one kernel at a time.

    For a helper process, which does nothing but compile: the settings are global, and are not restored.

    Raises:
        RuntimeError: the settings of this process are still different.
    """
    from torch._inductor import config

    config.load_config(settings["options"])  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["dtype"])
    torch.set_deterministic_debug_mode(settings["deterministic"])
    _of_determinism().fill_uninitialized_memory = settings["fill"]
    torch.backends.mkldnn.enabled = settings["mkldnn"]
    for matmul, precision in zip(_of_matmuls(), settings["precision"], strict=True):
        if matmul.fp32_precision != precision:
            matmul.fp32_precision = precision
    if settings["cuda"] is not None:
        device, *reduced = settings["cuda"]
        torch.cuda.set_device(device)
        matmul = torch.backends.cuda.matmul
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = reduced
    found = portable_settings() or {}
    different = [name for name in settings if name != "options" and settings[name] != found.get(name)]
    if different:
        raise RuntimeError(f"zgraph: settings of the rank that this process cannot have: {', '.join(different)}")
    config.compile_threads = 1


def _of_determinism() -> Any:
    return torch.utils.deterministic


def _of_matmuls() -> tuple[Any, Any]:
    of_mkldnn: Any = torch.backends.mkldnn
    return torch.backends.cuda.matmul, of_mkldnn.matmul


def _cuda_settings() -> tuple[Any, ...] | None:
    if not torch.cuda.is_initialized():
        return None
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return torch.cuda.current_device(), *reduced


def load_cpp(source: str) -> ctypes.CDLL:
    """Compile C++ source without torch headers, and load the library; compiled once per machine.

    The library stays in Inductor's cache directory, under a key of source, command line and processor; concurrent
    processes wait for the first one. Floating-point arithmetic follows IEEE: no fused multiply-add, and no assumptions
    about NaNs, signed zeros or the order of sums.

    torch 2.11 - 2.15: `cpp_builder`, `codecache.write`, `torch.utils._filelock`. Inductor's compiler options
    (`CppOptions`) are not used, because they turn off the vectorization of loops.

    Raises:
        RuntimeError: there is no compiler, or it rejects the source.
        OSError: the cache directory cannot be written to, or the library cannot be loaded.
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
    """Return text that describes this processor, as part of the key of code compiled for it."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.partition("\t")[0].strip(" :") in kept)


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would call, or None (torch 2.11 - 2.15: `get_cpp_compiler`)."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except RuntimeError:  # InvalidCxxCompiler, or others on Windows
        return None


def inductor_cache_directory() -> str:
    """Return the path of Inductor's cache directory, which may not exist yet.

    torch 2.11 - 2.15: `default_cache_dir`.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def cpu_features() -> dict[str, bool]:
    """Return which features this processor has, by name, such as "avx512_bf16"; empty if torch reports none.

    torch 2.11 - 2.15: `torch.cpu.get_capabilities`, which is public.
    """
    found: Any = torch.cpu.get_capabilities()
    return {name: value for name, value in dict(found).items() if isinstance(value, bool)}
