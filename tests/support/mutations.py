"""Small faults put into the product one after another, to see which tests notice them.

    python -m tests.support.mutations COPY --seed 31 --count 30

COPY is a clean clone of the repository; each fault is written to it, the tests run there until the first fails, and the
file is restored. One line per fault says which test caught it, or that none did.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from tests.support.sources import PRODUCT

# What reads a GPU, another torch or another system does not run here, and texts are not behaviour.
LEFT_OUT = ("torch_compat/", "kernels/", "cuda", "gpu", "cli/", "__main__", "errors.py", "__init__", "doctor")
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}


@dataclass(frozen=True)
class Mutation:
    """One fault: `new` instead of `old`, which begins at byte `start` of the file `path`, in line `line`."""

    path: str
    line: int
    start: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.old.split())} -> {self.new}"

    def applied_to(self, source: str) -> str:
        """Return the source with the fault."""
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.start + len(self.old.encode()) :]).decode()


def _mutants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of an expression or statement."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case _:
            return


def mutations_of(path: str, source: str) -> Iterator[Mutation]:
    """Yield each fault that can be put into the functions of a file."""
    text = source.encode()
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
    todo: list[ast.AST] = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    functions = set(todo)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None:
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            for mutant in _mutants(node):
                new = f"({ast.unparse(mutant)})" if isinstance(mutant, ast.expr) else ast.unparse(mutant)
                yield Mutation(path, node.lineno, start, text[start:end].decode(), new)
        # Texts of errors are not behavior; an inner function has a turn of its own.
        children = node.body if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node)
        todo += [
            child for child in children if not isinstance(child, ast.Raise | ast.JoinedStr) and child not in functions
        ]


def drawn(seed: int, count: int) -> list[Mutation]:
    """Draw faults: first the room, then one of all faults that its files can have."""
    by_room: dict[str, list[Mutation]] = {}
    for path, source in PRODUCT.items():
        if not any(part in path for part in LEFT_OUT):
            room = "/".join(path.split("/")[: 2 if path.startswith("zgraph/") else 1])
            by_room.setdefault(room, []).extend(mutations_of(path, source))
    draw = random.Random(seed)
    rooms = sorted(room for room in by_room if by_room[room])
    return [draw.choice(by_room[draw.choice(rooms)]) for _ in range(count)]


def _tests_in_order(copy: Path, mutation: Mutation) -> list[list[str]]:
    """Return the folders of tests in two groups: those of the fault's room, and the others."""
    room = mutation.path.removeprefix("zgraph/").split("/")[0]
    folders = [path for path in sorted((copy / "tests").iterdir()) if path.is_dir() and list(path.glob("test_*.py"))]
    first = [str(path) for path in folders if path.name == room]
    return [group for group in (first, [str(path) for path in folders if path.name != room]) if group]


def caught_by(copy: Path, mutation: Mutation, options: list[str]) -> str | None:
    """Return the first test that fails with the fault in a clone of the repository; None if all pass."""
    file = copy / mutation.path
    source = file.read_text()
    try:
        file.write_text(mutation.applied_to(source))
        for group in _tests_in_order(copy, mutation):
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "--no-header",
                *options,
                *group,
            ]
            run = subprocess.run(command, cwd=copy, capture_output=True, text=True)
            if run.returncode:
                failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0].split(" - ")[0] if failed else f"exit {run.returncode}: {run.stdout[-200:]}"
        return None
    finally:
        file.write_text(source)


def main() -> None:
    """Try the faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("copy", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--part", default="1/1", help="K/N: try the K-th of N parts of the faults")
    parser.add_argument("--pytest", default="", help="options for pytest, such as '-n 2'")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    for mutation in drawn(given.seed, given.count)[part - 1 :: parts]:
        start = time.monotonic()
        found = caught_by(given.copy.resolve(), mutation, given.pytest.split())
        print(f"{mutation}\n    {found or 'NOT CAUGHT'} ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
