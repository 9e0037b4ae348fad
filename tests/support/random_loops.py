"""Training loops drawn by a seed, as the source of a function that runs on the plain model and on a sharded one."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support import user_loops
from tests.support.user_loops import Loop, follow, verdict

PARTS = ("enter", "blocks[0]", "blocks[1].mix", "blocks[1]", "head", "other")
HEAD = """\
model, call = run.model, run.call
enter, head, other, block = (run.compiled(part) for part in (model.enter, model.head, model.other, model.blocks[0]))
weight = 1.0
"""
WHOLE = (
    "both({call}(x), y)",
    "both({call}(x), y) * weight",
    "both({call}(x), y) + 0.5 * both({call}(-x), y)",
)
PARTIAL = (
    "ce({call}(x), y)",
    "ce(head(torch.tanh(enter(x))), y)",
    "ce(other(block(torch.tanh(enter(x)))), y)",
    "both({call}(x), y) + ce(head(torch.tanh(enter(x))), y)",
    "both({call}(x), y) + (other(block(F.pad(x, (0, 2)))) - {call}(x)[1].detach()).square().mean()",
)


@dataclass(frozen=True)
class Program:
    """A drawn loop.

    Attributes:
        mode: see `user_loops.MODES`.
        statements: of the loop, in order; each may be left out when a failure is made smaller.
        body: in mode "step": the statements of the function that is captured.
    """

    seed: int
    mode: str
    stage: int
    optimizer: str
    statements: tuple[str, ...]
    body: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        text = HEAD + f"opt = {self.optimizer}\n"
        if self.mode == "step":
            inner = "".join(self.body) + "opt.step()\nreturn total\n"
            inner = "opt.zero_grad()\ntotal = torch.zeros(())\n" + inner
            text += "\n@run.step(opt)\ndef train(x, y):\n" + textwrap.indent(inner, "    ") + "\n"
        return "def loop(run):\n" + textwrap.indent(text + "".join(self.statements), "    ")

    @property
    def script(self) -> str:
        """To be pasted into a file, which prints the verdict."""
        return (
            f"# Program {self.seed}. In the root of the repository: torchrun --nproc-per-node 2 FILE\n"
            "import torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\n"
            "from tests.support.user_loops import adamw, both, ce, verdict\n\n\n"
            f"{self.source}\n\n"
            'dist.init_process_group("gloo")\n'
            "torch.set_default_dtype(torch.float64)\n"
            f'print(verdict(loop, "{self.mode}", {self.stage}, zeros={self.mode == "fx"}))\n'
        )

    def smaller(self) -> list[Program]:
        """With one statement less each."""
        return [
            replace(self, **{field: tuple(one for i, one in enumerate(found) if i != place)})
            for field, found in (("statements", self.statements), ("body", self.body))
            for place in range(len(found))
        ]


def loop_of(source: str) -> Loop:
    names: dict[str, Any] = {name: getattr(user_loops, name) for name in ("adamw", "both", "ce", "torch", "F")}
    exec(compile(source, "<drawn>", "exec"), names)  # drawn above, from the tables of this file
    return names["loop"]


def judge(program: Program) -> tuple[str, str]:
    """A verdict, see `user_loops.verdict`; or "void" where the plain model raises: such a loop tells nothing.

    In float64: of two thousand loops some have a sum that nearly cancels, whose rounding in float32 looks like a fault.
    """
    loop = loop_of(program.source)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        expected = follow(loop, "eager", None)
    except Exception as error:
        return "void", f"{type(error).__name__}: {error}"
    else:
        return verdict(loop, program.mode, program.stage, zeros=program.mode == "fx", expected=expected)
    finally:
        torch.set_default_dtype(before)


def judge_together(program: Program) -> tuple[str, str]:
    """As `judge`, on a rank whose groups may be left in disorder by what is neither right nor refused.

    Raises:
        AssertionError: it is neither; ranks are started anew after an error.
    """
    kind, text = judge(program)
    assert kind in ("right", "refused", "void"), f"{kind}: {text}"
    return kind, text


class Drawing:
    """Statements, one after another; what it draws is right for the plain model."""

    def __init__(self, seed: int, mode: str) -> None:
        self.chance = random.Random(f"{mode} {seed}")
        self.chance_of_rows = random.Random(f"rows {mode} {seed}")  # of its own, so that older draws stay as they were
        self.mode = mode
        self.batches = 0

    def draw(self, seed: int) -> Program:
        # Where a graph is compiled, an output that the loss does not use has zeros as gradients, and None elsewhere.
        # Both are the same to plain SGD.
        optimizers = ["torch.optim.SGD(model.parameters(), lr=0.05)"]
        if self.mode == "eager":
            optimizers += ["adamw(model.parameters())", "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"]
        if self.mode == "step":
            optimizers[0] = optimizers[0].replace("lr=0.05", "lr=0.05, momentum=0.5")
        program = Program(seed, self.mode, self.chance.randrange(4), self.chance.choice(optimizers), ())
        if self.mode == "step":
            body = tuple(self.micro_step(number) for number in range(self.chance.randint(1, 2)))
            if self.chance.random() < 0.5:
                body += (self.on_gradients(),)
            program = replace(program, body=body + tuple(self.on_rows()))
        count = self.chance.randint(3, 5) if self.mode == "eager" else self.chance.randint(2, 3)
        return replace(program, statements=tuple(one for _ in range(count) for one in self.round()))

    # --- whole rounds -----------------------------------------------------------------------------------------------

    def round(self) -> list[str]:
        """What leads to one step of the optimizer, and something before it."""
        found = [self.between() for _ in range(self.chance.choice([0, 0, 1, 1, 2]))]
        if self.mode == "step":
            return [*found, f"run.log_loss(train(*run.batch({self.number()})))\nrun.log_grads()\n"]
        if self.chance.random() < 0.75:
            found.append(self.clearing())
        if self.chance.random() < 0.4:
            found += self.window()
        found += [self.backwards() for _ in range(self.chance.choice([0, 1, 1, 2]))] or [self.backwards()]
        if self.chance.random() < 0.4:
            found.append(self.on_gradients())
        found += [*self.on_rows(), "run.log_grads()\nopt.step()\n"]
        return [*found, *([self.clearing()] if self.chance.random() < 0.3 else [])]

    def number(self) -> int:
        self.batches += 1
        return self.batches

    def batch(self) -> str:
        return f"x, y = run.batch({self.number()})\n"

    def loss(self, partial: bool = True, call: str = "call") -> str:
        return self.chance.choice(WHOLE + (PARTIAL if partial else ())).format(call=call)

    # --- in the function that is captured ---------------------------------------------------------------------------

    def micro_step(self, number: int) -> str:
        return (
            self.chance.choice(
                [
                    f"loss = {self.loss(call='model')}\nloss.backward()\n",
                    f"loss = {self.loss(call='model')}\nloss.backward(retain_graph=True)\n(2 * loss).backward()\n",
                    f"first, loss = {self.loss(call='model')}, {self.loss(call='model')}\n"
                    "loss.backward()\nfirst.backward()\n",
                    f"with torch.no_grad():\n    y = (y + 1) % 3 if {number} else model(x)[0].argmax(1)\n"
                    f"loss = {self.loss(call='model')}\nloss.backward()\n",
                    f"with run.no_sync():\n    loss = {self.loss(False, 'model')}\n    loss.backward()\n"
                    f"loss = {self.loss(False, 'model')}\nloss.backward()\n",
                ]
            )
            + "total = total + loss.detach()\n"
        )

    # --- forwards and backwards -------------------------------------------------------------------------------------

    def backwards(self, partial: bool = True) -> str:
        loss = f"{self.batch()}loss = {self.loss(partial)}\n"
        log = "run.log_loss(loss)\n"
        two = f"{self.batch()}first = {self.loss(partial)}\n{loss}"
        return self.chance.choice(
            [
                loss + "loss.backward()\n" + log,
                loss + "loss.backward()\n" + log,
                loss + "loss.backward(retain_graph=True)\n(weight * loss).backward()\n" + log,
                two + "first.backward()\nloss.backward()\n" + log,
                two + "loss.backward()\nfirst.backward()\n" + log,
                two + "(0.5 * first + loss).backward()\n" + log,
                two + "loss.backward()\n" + log,
                two + "torch.autograd.backward([first, loss])\n" + log,
                loss + "grads = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)\n"
                "for p, grad in zip(head.parameters(), grads):\n    p.grad = grad\n" + log
                if partial and self.mode == "eager"
                else loss + "loss.backward()\n" + log,
                f"{self.batch()}x.requires_grad_()\nloss = {self.loss(partial)}\n"
                "(slope,) = torch.autograd.grad(loss, x)\nx = (x + 0.1 * slope.sign()).detach()\n"
                f"loss = {self.loss(partial)}\nloss.backward()\n" + log,
            ]
        )

    def window(self) -> list[str]:
        """Micro-batches under no_sync, something between them, and one that closes the window."""
        found: list[str] = []
        for _ in range(self.chance.randint(1, 2)):
            if self.chance.random() < 0.3:
                found.append(self.evaluation())
            inner = self.backwards()
            if self.chance.random() < 0.3:  # what counts is where the forward ran
                inner = f"{self.batch()}loss = {self.loss()}\n"
                found.append("with run.no_sync():\n" + textwrap.indent(inner, "    ") + "loss.backward()\n")
            else:
                found.append("with run.no_sync():\n" + textwrap.indent(inner, "    "))
            if self.chance.random() < 0.2:
                found.append(self.clearing())
            if self.chance.random() < 0.15:
                found.append("with run.no_sync():\n" + textwrap.indent(self.failure(), "    "))
        return [*found, f"{self.batch()}loss = {self.loss(False)}\nloss.backward()\nrun.log_loss(loss)\n"]

    # --- between them -----------------------------------------------------------------------------------------------

    def clearing(self) -> str:
        return self.chance.choice(
            [
                "opt.zero_grad()\n",
                "model.zero_grad()\n",
                "for p in model.parameters():\n    p.grad = None\n",
                "opt.zero_grad(set_to_none=False)\n",
                "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.zero_()\n",
            ]
        )

    def on_gradients(self) -> str:
        ways = [
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
            "torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)\n",
            "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)\n",
            "for p in model.head.parameters():\n    p.grad = None\n",
        ]
        return self.chance.choice(ways)

    def on_rows(self) -> list[str]:
        """In every fourth round a write to parts of tensors that other ranks may hold."""
        ways = [
            "for p in model.parameters():\n    if p.grad is not None and p.ndim:\n        p.grad[:2] = 0\n",
            "if model.enter.weight.grad is not None:\n    model.enter.weight.grad[-2:].mul_(0.5)\n",
            "with torch.no_grad():\n    model.head.weight[1].zero_()\n    model.enter.weight.data[:, 2] = 0.1\n",
            "with torch.no_grad():\n    model.enter.bias[3] += 0.5\n    model.blocks[1].mix.weight.t()[0].neg_()\n",
        ]
        return [self.chance_of_rows.choice(ways)] if self.chance_of_rows.random() < 0.25 else []

    def evaluation(self) -> str:
        mode = self.chance.choice(["no_grad", "inference_mode", "no_grad"])
        call = self.chance.choice(["both(call(x), y)", "ce(call(x), y)", "ce(head(torch.tanh(enter(x))), y)"])
        return f"{self.batch()}model.eval()\nwith torch.{mode}():\n    run.log_loss({call}.clone())\nmodel.train()\n"

    def failure(self) -> str:
        return (
            f"model.fails = True\n{self.batch()}try:\n    both(call(x), y).backward()\nexcept ArithmeticError:\n"
            "    pass\nfinally:\n    model.fails = False\n"
        )

    def between(self) -> str:
        part = self.chance.choice(PARTS[:4])
        ways = [
            f"model.{part}.requires_grad_({self.chance.random() < 0.5})\n",
            f"model.{part}.requires_grad_({self.chance.random() < 0.5})\n",
            f"model.depth = {self.chance.choice([1, 2, 2, 3])}\n",
            f"weight = {self.chance.choice([0.5, 1.5, 3])}\n",
            self.evaluation(),
            f"{self.batch()}call(x)\n",
            "with torch.no_grad():\n    for p in model.blocks[0].parameters():\n        p.mul_(0.9)\n",
            f"kept = {{name: value.clone() for name, value in model.state_dict().items()}}\n{self.batch()}"
            "model.zero_grad()\nboth(call(x), y).backward()\nopt.step()\nmodel.load_state_dict(kept)\n",
            f"opt.param_groups[0]['lr'] = {self.chance.choice([0.01, 0.02, 0.1])}\n",
        ]
        if self.mode == "eager":
            ways += [
                self.failure(),
                "hook = model.blocks[0].register_forward_hook(lambda module, args, result: 0.5 * result)\n"
                f"{self.backwards()}hook.remove()\n",
                "hook = model.head.register_full_backward_hook(lambda module, inner, outer: (2 * inner[0],))\n"
                f"{self.backwards()}hook.remove()\n",
                f"{self.batch()}(float('nan') * both(call(x), y)).backward()\nmodel.zero_grad()\n",
            ]
        return self.chance.choice(ways)


def draw(seed: int, mode: str) -> Program:
    return Drawing(seed, mode).draw(seed)


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """As few statements as still fail, each of which is needed."""
    while True:
        for smaller in program.smaller():
            if fails(smaller):
                program = smaller
                break
        else:
            return program
