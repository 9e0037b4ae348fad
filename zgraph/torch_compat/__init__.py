"""The only package that uses private torch names; docstrings say on which torch versions each name was tested.

A note such as "(torch 2.11 - 2.15: `_name`)" gives the private name and the tested versions. Everything was run with
the CUDA builds of 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; notes on single versions say what differs there. To
support a new torch release, run the test suite (`make test TORCH=...`, which ends with a list of failures) and read
this package.
"""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from zgraph.errors import ZgraphWarning

OLDEST = (2, 11)
NEWEST = (2, 15)
# Names that only some builds of a version have, or that are used only if present.
OPTIONAL = frozenset({"torch.distributed.ProcessGroupNCCL", "torch.distributed.all_gather_into_tensor"})
CHECKED = "torch>={}.{},<{}.{}".format(*OLDEST, NEWEST[0], NEWEST[1] + 1)


def release_of(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ImportError(f"zgraph: cannot read the torch version {version!r}; install {CHECKED}.")
    return int(found[1]), int(found[2])


def require_supported_torch(version: str) -> None:
    """Refuse a torch version that is too old; warn about one that is newer than all tested versions.

    Raises:
        ImportError: the version is too old, or lacks a name that zgraph uses.
    """
    release = release_of(version)
    if release < OLDEST:
        raise ImportError(f"zgraph: torch {version} is too old; install {CHECKED}.")
    if release > NEWEST:
        _look_at_newer_torch(version)


def _look_at_newer_torch(version: str) -> None:
    missing = missing_names()
    if missing:
        raise ImportError(
            f"zgraph: torch {version} lacks names that zgraph uses: {', '.join(missing)}; install {CHECKED} or a newer "
            "zgraph."
        )
    warnings.warn(
        f"zgraph: torch {version} is newer than the newest that this zgraph was checked with, "
        f"{NEWEST[0]}.{NEWEST[1]}; compare the first steps with those of the plain model, or install {CHECKED} or a "
        "newer zgraph.",
        ZgraphWarning,
        stacklevel=2,
    )


def names_used() -> list[str]:
    """Return the full names of all torch functions, classes and modules that the files of this package use.

    Attributes of objects of unknown class are not included. Empty if zgraph was installed without its source.
    """
    found: dict[str, None] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found |= dict.fromkeys(names_in(ast.parse(path.read_text(encoding="utf-8"))))
    return list(found)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the full torch names in parsed source code: imports, and attributes of imported names."""
    return _names_in(tree, {})


def _names_in(node: ast.AST, meaning: dict[str, str]) -> Iterator[str]:
    """Yield the full torch names below a node of the syntax tree.

    Args:
        node: node of the syntax tree.
        meaning: full name of each name imported so far.
    """
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        meaning = dict(meaning)
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            meaning[alias.asname or name] = name
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            meaning[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
            if _is_of_torch(name):
                yield name
    elif isinstance(node, ast.Attribute):
        start, _, rest = ast.unparse(node).partition(".")
        if start in meaning and _is_of_torch(meaning[start]) and rest.replace(".", "").isidentifier():
            yield f"{meaning[start]}.{rest}"
            return  # the full name includes every inner attribute
    for child in ast.iter_child_nodes(node):
        yield from _names_in(child, meaning)


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "functorch")


def missing_names() -> list[str]:
    """Return the torch names that zgraph uses and this torch version lacks; takes seconds for the imports."""
    return [name for name in names_used() if not _is_optional(name) and not exists(name)]


def _is_optional(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in OPTIONAL)


def exists(name: str) -> bool:
    """Return whether a dotted name refers to an importable module, or to an attribute of one."""
    parts = name.split(".")
    try:
        found = importlib.import_module(parts[0])
    except ImportError:
        return False
    for place, part in enumerate(parts[1:], start=1):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[: place + 1]))
            except (ImportError, TypeError):
                return False
    return True


require_supported_torch(torch.__version__)
