"""Buckets for the tests of kernels, and what a kernel is compiled to, without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.triton.constants import BlockConstants
from zgraph.codegen.kernels.triton.launch_options import LaunchOptions
from zgraph.compression.methods import BlockMethod, LoCo, RngKey
from zgraph.compression.payload import BucketLayout

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no wheels for this platform"
)

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SPECIAL = (float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-40, -1e-42, 3e-31, 1e37, -1e-8)
POINTERS = {F64: "*fp64", F32: "*fp32", BF16: "*bf16", F16: "*fp16", torch.int8: "*i8"}


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Sizes and dtypes of gradients, and who shares them."""

    method: BlockMethod = field(default_factory=LoCo)
    numels: tuple[int, ...] = (63, 1000, 4101)
    dtypes: tuple[torch.dtype, ...] = (F32, BF16, F16)
    world: int = 2
    stretches: int = 1

    @property
    def chunks(self) -> int:
        return self.world * self.stretches

    @property
    def layout(self) -> BucketLayout:
        lengths = tuple(-(-numel // self.chunks) for numel in self.numels)
        return BucketLayout(self.method, lengths, self.world, self.stretches)

    def grads(self, seed: int) -> list[Tensor]:
        """Drawn gradients; each lies within NaN, which a read beyond its ends would meet."""
        generator = torch.Generator().manual_seed(seed)
        return [
            within(torch.randn(numel, generator=generator).to(dtype))
            for numel, dtype in zip(self.numels, self.dtypes, strict=True)
        ]

    def states(self) -> list[dict[str, Tensor]]:
        return [
            {name: torch.zeros(shape, dtype=kept) for name, (shape, kept) in state.items()}
            for state in (self.method.state(length, self.chunks) for length in self.layout.numels)
        ]

    def payload(self, fill: int = 0) -> Tensor:
        return torch.full((self.world, self.layout.payload_bytes), fill, dtype=torch.uint8)

    def sent_to(self, receiver: int, draw: RngKey, grads: list[list[Tensor]]) -> Tensor:
        """[world, payload_bytes]: what every rank sends to one, given the gradients of each."""
        rows: list[Tensor] = []
        for rank, given in enumerate(grads):
            payload = self.payload()
            reference.quantize_bucket(given, self.states(), self.layout, draw, rank, payload)
            rows.append(payload[receiver])
        return torch.stack(rows)


def within(values: Tensor, margin: int = 40) -> Tensor:
    """The values as part of a longer tensor of NaN."""
    whole = torch.full((values.numel() + 2 * margin,), float("nan"), dtype=values.dtype)
    whole[margin : margin + values.numel()] = values.view(-1)
    return whole[margin : margin + values.numel()]


def with_special_values(values: Tensor, seed: int) -> Tensor:
    """A few elements replaced in place by what is not finite, or nearly zero, or huge; and a run of zeros."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(values.numel(), (len(SPECIAL),), generator=generator)
    values[places] = torch.tensor(SPECIAL).to(values.dtype)
    values[values.numel() // 2 : values.numel() // 2 + 300] = 0
    return values


def same_bits(found: Tensor, expected: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    return found.dtype == expected.dtype and torch.equal(found.view(integer), expected.view(integer))


@dataclass(frozen=True)
class Compiled:
    """A kernel as PTX and as machine code (SASS, disassembled), and what a thread of it takes."""

    ptx: str
    sass: str
    registers: int
    stack_bytes: int
    local_bytes: int


def compiled(kernel: Any, case: BlockConstants, options: LaunchOptions, contracts: bool, capability: int) -> Compiled:
    """A kernel for a GPU that is not there, on pointers to multiples of 16 bytes."""
    triton: Any = importlib.import_module("triton")
    compiler: Any = importlib.import_module("triton.compiler")
    backend: Any = importlib.import_module("triton.backends.compiler")
    names: list[str] = kernel.arg_names
    types = dict.fromkeys(names, "i64") | {"table": "*i64", "programs": "*i32", "payload": "*u8", "received": "*u8"}
    types |= dict.fromkeys(("key", "sign_bit", "base", "first_rank", "ranks"), "i32") | {
        "divisor": "fp32",
        "CASE": "constexpr",
        "THREADS": "constexpr",
    }
    source = compiler.ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={"CASE": case, "THREADS": options.threads},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name][0] == "*"},
    )
    made = triton.compile(
        source,
        target=backend.GPUTarget("cuda", capability, 32),
        options={"num_warps": options.warps, "enable_fp_fusion": contracts},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run(
                [tool.path, option, file.name], check=True, capture_output=True, text=True, timeout=60
            ).stdout
            for tool, option in ((triton.knobs.nvidia.cuobjdump, "-res-usage"), (triton.knobs.nvidia.nvdisasm, "-c"))
        )
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(made.asm["ptx"], sass, numbers["REG"], numbers["STACK"], numbers["LOCAL"])


def assert_exact(found: Compiled, contracts: bool) -> None:
    """Every operation is rounded as IEEE says, by itself where contraction would change bits; nothing is spilled."""
    assert re.findall(r"\bdiv\.full\S*|\bdiv\.approx\S*|\brcp\.\S+|\S+\.ftz\S*", found.ptx) == []
    if not contracts:
        assert re.findall(r"\b(?:add|sub|mul)\.f32\b", found.ptx) == [], "ptxas may contract what says no .rn"
        assert "add.rn.f32" in found.ptx and "mul.rn.f32" in found.ptx
    assert (found.stack_bytes, found.local_bytes) == (0, 0)
    assert found.registers <= 255
