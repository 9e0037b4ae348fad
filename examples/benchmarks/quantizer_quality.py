"""How much noise each compression method adds to a gradient, and to the mean of many, at how many bits.

    python examples/benchmarks/quantizer_quality.py                       # three minutes on one core
    python examples/benchmarks/quantizer_quality.py --quick               # half a minute: smaller samples, no step 1000
    python examples/benchmarks/quantizer_quality.py --json quality.json

Noise is NMSE = |sent - g|^2 / |g|^2, in thousandths. Gradients are drawn (normal, Laplace, Student's t with three
degrees of freedom) or come from training the GPT of examples/train_gpt.py. A method that keeps an error is judged by
the last of several steps, whose gradients differ.

one gradient   what one rank sends, against its gradient
mean           of 2, 8 and 64 ranks, against the true mean: ranks with equal gradients, ranks whose gradients correlate
               by one half, and eight ranks of the GPT, each with its own batch
more           what more clipping levels would bring, and a rotation over the whole group

All runs on `zgraph.codegen.kernels.reference`, which other kernels equal bit for bit. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from simulated_ranks import wire_bits
from torch import Tensor

from zgraph.codegen.kernels import reference
from zgraph.compression.methods import BlockMethod, ErrorFeedback, LoCo, NoFeedback, RngKey

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import GPT, cut, lr_factor, make_optimizer, read_sources

METHODS: dict[str, BlockMethod] = {
    "plain, 8 bits": NoFeedback(bits=8),
    "plain, 8 bits, groups of 512": NoFeedback(bits=8, group=512),
    "plain, 4 bits": NoFeedback(),
    "+ clip search": NoFeedback(clip_search=True),
    "+ rotation": NoFeedback(clip_search=True, rotate=True),
    "+ moving error: LoCo()": LoCo(),
    "LoCo(rotate=False)": LoCo(rotate=False),
    "ErrorFeedback()": ErrorFeedback(),
    "plain, 2 bits": NoFeedback(bits=2),
    "LoCo(bits=2, rotate=False)": LoCo(bits=2, rotate=False),
    "LoCo(bits=2)": LoCo(bits=2),
    "ErrorFeedback(bits=2)": ErrorFeedback(bits=2),
}
RANKS = (2, 8, 64)
GPT_RANKS = 8
CORRELATION = 0.5

Step = list[Tensor]  # the gradients of one step
Sample = Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class ManyClips(NoFeedback):
    """Fourteen clipping levels instead of two."""

    rotate: bool = True
    clip_search: bool = True

    @property
    def clips(self) -> tuple[float, ...]:
        return tuple(1.0 - 0.05 * place for place in range(14))


@dataclass(frozen=True, kw_only=True)
class WholeGroup(NoFeedback):
    """Marks a rotation over all of a group, see `mix_blocks`."""

    rotate: bool = True
    clip_search: bool = True


MORE: dict[str, BlockMethod] = {
    "4 bits, rotated, 1 clip": NoFeedback(rotate=True),
    "4 bits, rotated, 2 clips (default)": NoFeedback(rotate=True, clip_search=True),
    "4 bits, rotated, 14 clips": ManyClips(),
    "4 bits, rotated over all 128, 2 clips": WholeGroup(),
    "4 bits, groups of 32": NoFeedback(rotate=True, clip_search=True, group=32),
    "4 bits, groups of 1024": NoFeedback(rotate=True, clip_search=True, group=1024),
    "4 bits, groups of 1024, over all": WholeGroup(group=1024),
    "2 bits, rotated, 1 clip": NoFeedback(rotate=True, bits=2),
    "2 bits, rotated, 3 clips (default)": NoFeedback(rotate=True, clip_search=True, bits=2),
    "2 bits, rotated, 14 clips": ManyClips(bits=2),
    "2 bits, rotated over all 128, 3 clips": WholeGroup(bits=2),
}


# --- gradients ------------------------------------------------------------------------------------------------------


def gauss(numel: int, random: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=random)


def laplace(numel: int, random: torch.Generator) -> Tensor:
    """The difference of two exponential waiting times."""
    waits = torch.empty(2, numel).exponential_(generator=random)
    return waits[0] - waits[1]


def student_t3(numel: int, random: torch.Generator) -> Tensor:
    normal = torch.randn(4, numel, generator=random)
    return normal[0] / normal[1:].square().mean(0).sqrt()


DRAWN: dict[str, Sample] = {"gauss": gauss, "laplace": laplace, "t3": student_t3}


def gpt_gradients(steps: Sequence[int], history: int) -> dict[int, list[list[Step]]]:
    """Train the example's GPT, small, on one rank; for each of `steps`, of the last `history` steps up to it, the
    gradients of its matrices on eight ranks' batches.

    The first of the eight trains.
    """
    torch.manual_seed(0)
    text, _ = read_sources()
    model = GPT(layers=2, width=128, heads=4, sequence=128)
    optimizer = make_optimizer(model, lr=1.5e-3)
    total = max(1000, *steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    batches = [torch.Generator().manual_seed(rank) for rank in range(GPT_RANKS)]

    def backward(rank: int) -> None:
        optimizer.zero_grad()
        starts = torch.randint(len(text) - 128, (8,), generator=batches[rank])
        model(*cut(text, starts, 128)).backward()

    found: dict[int, list[list[Step]]] = {step: [] for step in steps}
    for step in range(1, max(steps) + 1):
        wanted = [target for target in steps if target - history < step <= target]
        if wanted:
            seen: list[Step] = []
            for rank in reversed(range(GPT_RANKS)):
                backward(rank)
                seen.insert(0, [grad.clone() for parameter in matrices if (grad := parameter.grad) is not None])
            for target in wanted:
                found[target].append(seen)
        else:
            backward(0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return found


# --- noise ----------------------------------------------------------------------------------------------------------


def mix_blocks(grad: Tensor, group: int, *, back: bool) -> Tensor:
    """Mix the neighbours which a rotation of 32 leaves apart: with it, it is a rotation over the whole group.

    A block of 32 holds runs of 8 neighbours; so the other half of the Kronecker product acts on elements of equal place
    in neighbouring runs. Signs of its own come first.
    """
    size = group // 32
    signs = reference.draw_signs(-(-grad.numel() // group), group, RngKey(0, salt=99), 0).flatten()[: grad.numel()]
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    matrix = matrix / size**0.5
    flat = grad.flatten()
    runs = (flat if back else flat * signs).view(-1, size, reference.RUN)
    mixed = (matrix @ runs).flatten()
    return (mixed * signs if back else mixed).view_as(grad)


class Rank:
    """One rank's quantizer, with what it keeps for each gradient."""

    def __init__(self, method: BlockMethod, rank: int) -> None:
        self.method, self.rank = method, rank
        self.states: list[dict[str, Tensor]] = []

    def send(self, grads: Step, step: int) -> Step:
        """What a receiver reads."""
        if not self.states:
            kinds = [self.method.state(grad.numel(), 1) for grad in grads]
            self.states = [
                {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kind.items()} for kind in kinds
            ]
        draw, sent = RngKey(step), list[Tensor]()
        whole = isinstance(self.method, WholeGroup)
        for grad, state in zip(grads, self.states, strict=True):
            given = mix_blocks(grad, self.method.group, back=False) if whole else grad
            codes, scales = reference.quantize(given.reshape(1, -1), state, self.method, draw, self.rank)
            read = reference.dequantize_sum(codes, scales, grad.numel(), self.method, draw, self.rank).view_as(grad)
            sent.append(mix_blocks(read, self.method.group, back=True) if whole else read)
        return sent


def nmse(found: Step, wanted: Step) -> float:
    pairs = list(zip(found, wanted, strict=True))
    noise = sum((left.double() - right.double()).square().sum().item() for left, right in pairs)
    return noise / sum(right.double().square().sum().item() for _, right in pairs)


def noise_of_one(method: BlockMethod, steps: Sequence[Step]) -> float:
    """NMSE of the last step; those before are for the error alone."""
    rank = Rank(method, 0)
    if method.residual_decay is None:
        return nmse(rank.send(steps[-1], len(steps)), steps[-1])
    sent = [rank.send(grads, step) for step, grads in enumerate(steps)]
    return nmse(sent[-1], steps[-1])


def noise_of_mean(method: BlockMethod, steps: Sequence[Sequence[Step]]) -> float:
    """NMSE of the mean over ranks in the last step; steps: of each step and rank, its gradients."""
    used = steps if method.residual_decay is not None else steps[-1:]
    total: Step = []
    for place in range(len(used[0])):
        rank, sent = Rank(method, place), list[Tensor]()
        for step, ranks in enumerate(used):
            sent = rank.send(ranks[place], step)
        total = [old + new for old, new in zip(total, sent, strict=True)] if total else sent
    count = len(used[0])
    means = [torch.stack(parts).mean(0) for parts in zip(*used[-1], strict=True)]
    return nmse([part / count for part in total], means)


def drawn_ranks(sample: Sample, ranks: int, numel: int, steps: int, correlation: float) -> list[list[Step]]:
    """Of each step and rank, a gradient that shares a part with those of the other ranks."""
    random = torch.Generator().manual_seed(0)
    found: list[list[Step]] = []
    for _ in range(steps):
        shared = correlation**0.5 * sample(numel, random)
        own = (1 - correlation) ** 0.5
        found.append([[shared + own * sample(numel, random)] if own else [shared] for _ in range(ranks)])
    return found


# --- tables ---------------------------------------------------------------------------------------------------------


def table(title: str, columns: Sequence[str], rows: dict[str, list[float]]) -> None:
    width = max(map(len, rows))
    print(f"\n{title}\n{'':<{width}}  " + "".join(f"{column:>12}" for column in columns))
    for name, values in rows.items():
        print(f"{name:<{width}}  " + "".join(f"{value:>12.4g}" for value in values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--numel", type=int, default=1 << 20, help="elements of a drawn gradient; a multiple of 1024")
    add("--mean-numel", type=int, default=1 << 15, help="the same where many ranks send; a multiple of 1024")
    add("--steps", type=int, default=12, help="steps until the kept error is judged")
    add("--quick", action="store_true", help="smaller samples, and no GPT at step 1000")
    add("--json", metavar="FILE", help="write all figures to this file")
    if parser.parse_args().quick:
        parser.set_defaults(numel=1 << 17, mean_numel=1 << 12, steps=6)
    options = parser.parse_args()
    for name in ("numel", "mean_numel"):
        if getattr(options, name) < 1024 or getattr(options, name) % 1024:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is no multiple of 1024")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}; it must be at least 1")
    torch.set_num_threads(1)

    gpt_steps = (1, 100) if options.quick else (1, 100, 1000)
    captured = gpt_gradients(gpt_steps, options.steps)
    alone: dict[str, list[Step]] = {}
    for name, sample in DRAWN.items():
        random = torch.Generator().manual_seed(0)
        alone[name] = [[sample(options.numel, random)] for _ in range(options.steps)]
    for step, seen in captured.items():
        alone[f"GPT {step}"] = [ranks[0] for ranks in seen]

    columns = ["bits", *alone]
    one: dict[str, list[float]] = {}
    more: dict[str, list[float]] = {}
    for rows, methods in ((one, METHODS), (more, MORE)):
        for name, method in methods.items():
            rows[name] = [wire_bits(method), *(1e3 * noise_of_one(method, steps) for steps in alone.values())]
    table(f"one gradient, NMSE x 1e-3, after {options.steps} steps where an error is kept", columns, one)
    table("NMSE x 1e-3 with more clipping levels, wider rotations, other groups", columns, more)

    many: dict[str, list[list[Step]]] = {}
    for name, sample in (("gauss", gauss), ("t3", student_t3)):
        for kind, correlation in (("=", 1.0), ("~", CORRELATION)):
            for ranks in RANKS:
                # Sixty-four states for each of many steps is what takes long; their error settles in a few.
                many[f"{name} {kind}{ranks}"] = drawn_ranks(
                    sample, ranks, options.mean_numel, min(options.steps, 6), correlation
                )
    many |= {f"GPT {step}": seen for step, seen in captured.items()}
    means = {name: [1e3 * noise_of_mean(method, steps) for steps in many.values()] for name, method in METHODS.items()}
    table(
        f"mean, NMSE x 1e-3 of the true mean: '=' ranks with equal gradients, '~' with correlation {CORRELATION}; GPT: "
        f"{GPT_RANKS} ranks",
        list(many),
        means,
    )
    if options.json:
        figures = {
            "one": {name: dict(zip(columns, values, strict=True)) for name, values in (one | more).items()},
            "mean": {name: dict(zip(many, values, strict=True)) for name, values in means.items()},
        }
        Path(options.json).write_text(json.dumps({"options": vars(options), **figures}, indent=1))


if __name__ == "__main__":
    main()
