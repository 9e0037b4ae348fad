"""Compiles a training step for a GPU that is not there, and counts what the compiled graphs do.

Runs in the process of `tests.support.cuda.pretended_gpu`.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

import zgraph
from tests.support.cuda import triton_driver
from tests.support.cuda.llama import Llama, Shape
from zgraph.codegen.inductor import InductorLowering
from zgraph.codegen.islands import Island
from zgraph.compiler.frame import Frame
from zgraph.compiler.graph_pass import Direction, GraphPass
from zgraph.driver.compile_frame import FrameCompiler
from zgraph.driver.options import CompileOptions
from zgraph.graph import edits, meta, nodes
from zgraph.graph.traffic import transfers
from zgraph.torch_compat.aot import boxed, rng_state_operators
from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.groups import fake_world
from zgraph.torch_compat.operators import OpOverload, returns_alias


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is compiled.

    Attributes:
        shape: of the model.
        lowering: "fx" or "inductor".
        world: ranks.
        zero_stage, param_dtype, reduce_dtype: as `zgraph.shard` takes them.
        passes, target: of the pipeline.
        tokens: of one rank's batch, [1, tokens].
        micro_batches: all but the last under `zgraph.no_sync`.
        trains: else forward alone, without gradients.
    """

    shape: Shape
    lowering: str = "inductor"
    world: int = 8
    zero_stage: int = 3
    param_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype | None = None
    passes: tuple[GraphPass, ...] = field(default_factory=lambda: tuple(zgraph.passes.presets.default()))
    target: zgraph.Target | None = None
    tokens: int = 2048
    micro_batches: int = 1
    trains: bool = True


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One compiled graph, when it runs once.

    Attributes:
        direction: "forward", "backward" or "inference".
        starts: collectives, by operator.
        waits: for them.
        islands: runs of operators that Inductor compiles, and
        distinct_islands: those of them that were not compiled before.
        triton: kernels that the islands launch.
        library: calls of matmuls and of attention, inside islands and outside, by name.
        eager: all other operators that run by themselves, by name; views do not count.
        sent_bytes: by this rank, without
        kept_bytes: what is sent for gathers whose result the rest of a window keeps.
    """

    direction: str
    starts: dict[str, int]
    waits: int
    islands: int
    distinct_islands: int
    triton: int
    library: dict[str, int]
    eager: dict[str, int]
    sent_bytes: int
    kept_bytes: int


class CountingLowering(InductorLowering):
    """Compiles islands as ever, and keeps the code that Inductor has written for each."""

    def __init__(self) -> None:
        super().__init__()
        self.code_of: dict[Any, str] = {}

    def _compile(self, islands: Iterable[Island], title: str) -> None:
        from torch._inductor.graph import GraphLowering

        for island in islands:
            written: list[str] = []
            with mock.patch.object(GraphLowering, "save_output_code", written.append):
                super()._compile([island], title)
            for run in self.compiled.values():
                if run not in self.code_of:
                    (self.code_of[run],) = written


LAUNCH = re.compile(r"^\s+(triton_\w+)\.run\(", re.MULTILINE)
LIBRARY = re.compile(r"^\s+.*?\b(?:extern_kernels\.(\w+)|torch\.ops\.aten\.(\w+)[\w.]*)\(", re.MULTILINE)


class CountingCompiler(FrameCompiler):
    """Compiles graphs for NCCL, counts, and returns what yields tensors without values."""

    def __init__(self, gm: fx.GraphModule, options: CompileOptions, found: list[Counts]) -> None:
        super().__init__(Frame.of_dynamo(gm), options, known=zgraph.PassContext(planned_backend="nccl"))
        self.found = found
        if self.lowering.inductor is not None:
            self.lowering.inductor = CountingLowering()

    def lower(
        self, direction: Direction, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[[list[Any]], Any]:
        outputs = [meta.value(node) if isinstance(node, fx.Node) else node for node in _returned(gm)]
        self.found.append(self._count(direction, gm))
        super().lower(direction, gm, inputs, **kwargs)

        def run(args: list[Any]) -> list[Any]:
            args.clear()
            return [torch.empty_like(each) if isinstance(each, Tensor) else each for each in outputs]

        return boxed(run)

    def _count(self, direction: Direction, gm: fx.GraphModule) -> Counts:
        sent = list(transfers(gm.graph))
        kept = sum(transfer.sent_bytes for transfer in sent if transfer.kind == "all_gather_kept")
        starts = Counter(str(node.target).split(".")[1] for node in nodes.call_functions(gm.graph, nodes.is_start))
        waits = len(list(nodes.call_functions(gm.graph, nodes.is_wait)))
        lowered = fx.GraphModule(gm, edits.copy_of(gm).graph)
        code_of: dict[Any, str] = {}
        islands = distinct = triton = 0
        if isinstance(self.lowering.inductor, CountingLowering):
            before = len(self.lowering.inductor.compiled)
            islands = self.lowering.inductor.place(lowered)
            distinct = len(self.lowering.inductor.compiled) - before
            code_of = self.lowering.inductor.code_of
        library: Counter[str] = Counter()
        eager: Counter[str] = Counter()
        for node in nodes.call_functions(lowered.graph, lambda _: True):
            if node.target in code_of:
                body = code_of[node.target].partition("def call(")[2]
                triton += len(LAUNCH.findall(body))
                library.update(first or second for first, second in LIBRARY.findall(body))
            elif isinstance(node.target, OpOverload) and not _is_free(node):
                name = node.target.overloadpacket.__name__
                (library if _is_in_a_library(name) else eager)[name] += 1
            elif node.target in rng_state_operators():
                wrapped = next(given for given in node.args if isinstance(given, OpOverload))
                eager[f"wrapped {wrapped.overloadpacket.__name__}"] += 1
        return Counts(
            direction=direction,
            starts=dict(sorted(starts.items())),
            waits=waits,
            islands=islands,
            distinct_islands=distinct,
            triton=triton,
            library=dict(sorted(library.items())),
            eager=dict(sorted(eager.items())),
            sent_bytes=sum(transfer.sent_bytes for transfer in sent) - kept,
            kept_bytes=kept,
        )


def _is_free(node: fx.Node) -> bool:
    return nodes.is_start(node) or nodes.is_wait(node) or returns_alias(node.target)


def _is_in_a_library(name: str) -> bool:
    return name in ("mm", "addmm", "bmm") or "scaled_dot_product" in name


def _returned(gm: fx.GraphModule) -> Sequence[Any]:
    return next(iter(reversed(gm.graph.nodes))).args[0]


def compile_only(async_compile: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
    """A Triton kernel of Inductor's, compiled to machine code and not loaded: that takes a GPU."""
    from torch._inductor.async_compile import _load_triton_kernel_from_source

    kernel = _load_triton_kernel_from_source(kernel_name, source_code)
    kernel.precompile(warm_cache_only=True)
    return kernel


def trace(step: Step) -> list[Counts]:
    """Compile forward and backward of a step's micro-batches, and count; in the order in which they are compiled."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    triton_driver.pretend()
    found: list[Counts] = []
    parsed = CompileOptions(lowering=step.lowering, passes=zgraph.PassList(step.passes, target=step.target))

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return CountingCompiler(gm, parsed, found).compile(gm, inputs)

    with (
        fake_world(step.world),
        mock.patch.object(AsyncCompile, "triton", compile_only),
        config.patch(compile_threads=1, fx_graph_cache=False),
    ):
        mode = fake_mode()
        with mode, torch.device("cuda"):
            model: nn.Module = Llama(step.shape)
            tokens = torch.zeros(1, step.tokens, dtype=torch.long)
        zgraph.shard(model, zero_stage=step.zero_stage, param_dtype=step.param_dtype, reduce_dtype=step.reduce_dtype)
        compiled = torch.compile(model, backend=backend, dynamic=False)
        try:
            with mode:
                if not step.trains:
                    with torch.no_grad():
                        compiled(tokens)
                    return found
                for number in range(step.micro_batches):
                    closes = number == step.micro_batches - 1
                    with contextlib.nullcontext() if closes else zgraph.no_sync(model):
                        compiled(tokens).backward()
        finally:
            torch.compiler.reset()
    return found
