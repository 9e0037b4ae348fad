"""What the compiled kernels cost, counted in their machine code, without a GPU.

    python -m tests.codegen.kernel_costs [NAME ...]     # prints what the cases cost, and in brackets their budgets

A multiprocessor issues at most four instructions in a cycle, each for 32 threads. At I instructions an element an H100
(132 multiprocessors at 1.7 GHz) does at most 28.7e12 / I elements a second; at B bytes an element its memory allows
3.35e12 / B.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field

import torch

from tests.codegen.kernels import BF16, F32, POINTERS, Compiled, compiled
from zgraph.codegen import triton_source
from zgraph.codegen.dequantize_blocks import emit_dequantize
from zgraph.codegen.launch_options import WARP, LaunchOptions
from zgraph.codegen.quantize_blocks import emit_quantize
from zgraph.compression import BlockMethod, LoCo, NoFeedback
from zgraph.wire_format import BucketLayout

CAPABILITIES = (80, 90)
WHOLE_VECTOR = 16  # bytes: the most that a thread moves with one instruction
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>.*)$")
_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True)
class Cost:
    """Costs of one program of a kernel; "an element" is one of those that it works on.

    Attributes:
        instructions: issued by all its threads, for each element. Of a branch both sides count, except the corrections
            that a division needs for numbers out of the ordinary.
        registers: of a thread.
        spilled_bytes: of a thread.
        loaded_bytes, stored_bytes: of global memory, asked for by all its threads, for each element: threads that ask
            for the same bytes count each.
        narrow_bytes: the part of both that is moved by instructions of less than 16 bytes.
        shared: accesses of shared memory and shuffles, for each element.
    """

    instructions: float
    registers: int
    spilled_bytes: int
    loaded_bytes: float
    stored_bytes: float
    narrow_bytes: float
    shared: float

    @classmethod
    def of(cls, found: Compiled, *, elements: int, threads: int, rounds: int = 1) -> Cost:
        """Count.

        Args:
            found: the kernel.
            elements: of a program.
            threads: of a program.
            rounds: how often its loops are run, each of them.
        """
        each = threads / elements
        counts: Counter[str] = Counter()
        for name, times in issued(found.sass, rounds):
            counts[name] += times
        moved = {name: _width(name) * count * each for name, count in counts.items() if name.startswith(("LDG", "STG"))}
        return cls(
            instructions=sum(counts.values()) * each,
            registers=found.registers,
            spilled_bytes=found.stack_bytes + found.local_bytes,
            loaded_bytes=sum(size for name, size in moved.items() if name.startswith("LDG")),
            stored_bytes=sum(size for name, size in moved.items() if name.startswith("STG")),
            narrow_bytes=sum(size for name, size in moved.items() if _width(name) < WHOLE_VECTOR),
            shared=sum(count for name, count in counts.items() if name.startswith(("LDS", "STS", "SHFL"))) * each,
        )


def issued(sass: str, rounds: int) -> list[tuple[str, int]]:
    """The instructions of a kernel's own part, and how often a thread runs each; what its loops hold, `rounds` times.

    Left out: functions that it calls, which are corrections of divisions, and the few instructions around such a call,
    which a branch passes by.
    """
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if line.startswith("$__internal"):
            break
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append((instruction["name"].rstrip(";"), instruction["rest"]))
    times = [1] * len(code)
    for place, (name, rest) in enumerate(code):
        target = _TARGET.search(rest)
        if name != "BRA" or target is None or target[1] not in labels:
            continue
        to = labels[target[1]]
        if to == place:  # behind the end: what would run on is caught here
            del code[place:]
            break
        if to < place:
            times[to : place + 1] = [rounds * once for once in times[to : place + 1]]
        elif any(passed.startswith("CALL") for passed, _ in code[place + 1 : to]):
            times[place + 1 : to] = [0] * (to - place - 1)
    return [(name, count) for (name, _), count in zip(code, times, strict=False) if name != "NOP" and count]


def _width(name: str) -> int:
    """Bytes that a thread moves with a load or store, such as LDG.E.128 or STG.E.U16; 4 where its name says none."""
    parts = name.split(".")[1:]
    return next((int(digits[1]) // 8 for part in parts if (digits := re.fullmatch(r"[US]?(8|16|64|128)", part))), 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel, and the most that it may cost on sm_80 and sm_90.

    Attributes:
        kind: "quantize" or "dequantize".
        dtypes: of the gradients, or of the outputs.
        dynamic: sizes are arguments.
        instructions, registers, narrow_bytes, shared: budgets, see `Cost`.
        world: ranks that share the bucket; so many payloads are dequantized.
        numel: elements of each gradient.
    """

    kind: str
    dtypes: tuple[torch.dtype, ...] = (BF16,)
    method: BlockMethod = field(default_factory=LoCo)
    dynamic: bool = False
    instructions: float
    registers: int
    narrow_bytes: float
    shared: float
    world: int = 8
    numel: int = 4096 * 14336  # a matrix of Llama 8B's MLP

    @property
    def layout(self) -> BucketLayout:
        return BucketLayout(self.method, (self.numel // self.world,) * len(self.dtypes), self.world)

    def needed_bytes(self) -> tuple[float, float]:
        """What has to be loaded and stored for an element."""
        item = sum(dtype.itemsize for dtype in self.dtypes) / len(self.dtypes)
        sent = sum(self.method.sections(self.method.group)) / self.method.group
        if self.kind == "dequantize":
            return self.world * sent, item
        state = self.method.state(self.method.group, 1).values()
        kept = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in state) / self.method.group
        return item + kept, sent + kept

    def compile(self, capability: int) -> Compiled:
        options = LaunchOptions().arguments(self.method)
        if self.kind == "quantize":
            numels = (self.numel,) * len(self.dtypes)
            source = emit_quantize(self.layout, self.dtypes, numels, dynamic=self.dynamic)
            kept = [POINTERS[dtype] for _, dtype in self.method.state(1, 1).values() for _ in self.dtypes]
        else:
            source = emit_dequantize(self.layout, self.dtypes, self.world, dynamic=self.dynamic)
            kept = []
        pointers = [*(POINTERS[dtype] for dtype in self.dtypes), *kept, "*u8", "*i16"]
        kernel = triton_source.load(source)[self.kind]
        return compiled(kernel, pointers, options["GROUPS"], options["num_warps"], capability)

    def measure(self, capability: int) -> Cost:
        options = LaunchOptions().arguments(self.method)
        return Cost.of(
            self.compile(capability),
            elements=options["GROUPS"] * self.method.group,
            threads=WARP * options["num_warps"],
            rounds=self.world if self.kind == "dequantize" else 1,
        )


# The one place where budgets stand: what `python -m tests.codegen.kernel_costs` prints, rounded up. Whoever makes a
# kernel better lowers them. Triton 3.6.0 and 3.7.1 differ by less than the rounding.
_EIGHT_BITS = NoFeedback(bits=8)
CASES = {
    "quantize": Case(kind="quantize", instructions=96, registers=246, narrow_bytes=0.25, shared=2.25),
    "quantize, sizes as arguments": Case(
        kind="quantize", dynamic=True, instructions=100, registers=246, narrow_bytes=0.25, shared=2.25
    ),
    "quantize two gradients": Case(
        kind="quantize", dtypes=(BF16, BF16), instructions=96, registers=247, narrow_bytes=0.25, shared=2.25
    ),
    "quantize to 8 bits": Case(
        kind="quantize", method=_EIGHT_BITS, instructions=29, registers=115, narrow_bytes=0.07, shared=2.13
    ),
    "dequantize": Case(kind="dequantize", dtypes=(F32,), instructions=158, registers=96, narrow_bytes=0.5, shared=1.0),
    "dequantize, sizes as arguments": Case(
        kind="dequantize", dtypes=(F32,), dynamic=True, instructions=167, registers=96, narrow_bytes=0.5, shared=1.0
    ),
    "dequantize 8 bits of one rank": Case(
        kind="dequantize", method=_EIGHT_BITS, world=1, instructions=29, registers=63, narrow_bytes=0.25, shared=0.25
    ),
}


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as cache:  # a new one: kernels are compiled now
        os.environ["TRITON_CACHE_DIR"] = cache
        for name in names or CASES:
            case = CASES[name]
            loaded, stored = case.needed_bytes()
            for capability in CAPABILITIES:
                found = case.measure(capability)
                print(
                    f"{name} sm_{capability}: {found.instructions:.1f} instructions ({case.instructions}), "
                    f"{found.registers} registers ({case.registers}), {found.spilled_bytes} bytes spilled, "
                    f"{found.loaded_bytes:.2f} bytes loaded of {loaded:.2f} needed, {found.stored_bytes:.2f} stored of "
                    f"{stored:.2f}, {found.narrow_bytes:.2f} in narrow accesses ({case.narrow_bytes}), "
                    f"{found.shared:.2f} shared ({case.shared})",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
