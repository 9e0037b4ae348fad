"""Docstrings name their subjects: the mechanical part of CONTRIBUTING's rules for prose."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.sources import PRODUCT

# What to write instead stands behind each.
PATTERNS = {
    r"^\s*\w+(, \w+)*: of (the|a|an|all|each|what|its|this)\b": "a noun: 'name: bytes of the ...'",
    r"^(Those|That|Of)\b": "a noun or a verb",
    r"\b(nobody|somebody|whoever|anybody)\b": "None, unused, the caller or the user",
    r"\b(so|as) many\.": "the number",
    r"(?<!there )\bis no (?!more|\w+er\b)\w": "is not a",
    r"\b(is|are) to (be|have|run|do|fit|hold|keep|take)\b": "must, will or should",
    r"\bin front of\b": "before",
}


def odd(docstring: str) -> list[str]:
    """Lines that match a pattern, with what to write."""
    return [
        f"{line.strip()[:80]!r}: write {instead}"
        for line in docstring.splitlines()
        for pattern, instead in PATTERNS.items()
        if re.search(pattern, line)
    ]


def test_docstrings_name_their_subjects() -> None:
    found: dict[str, list[str]] = {}
    for name, source in PRODUCT.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                for line in odd(text):
                    found.setdefault(f"{name}:{getattr(node, 'lineno', 1)}", []).append(line)
    assert found == {}


@pytest.mark.parametrize(
    "line",
    ["    bytes: of the shard.", "Those of the step.", "None: nobody asks.", "This is no JSON.", "It is to run last."],
)
def test_each_pattern_finds_its_fault(line: str) -> None:
    assert len(odd(line)) == 1
