"""The doors between the rooms: torch_compat <- core <- passes, codegen <- backend."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    f"{room}/{path.relative_to(ROOT / room)}": ast.parse(path.read_text())
    for room in ("zgraph", "passes", "codegen")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
}
FRONT_DOORS = ("zgraph/__init__.py", "zgraph/backend.py")
COMPAT = "zgraph/torch_compat.py"


def imports(tree: ast.Module) -> Iterator[str]:
    """Every imported module and name, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that starts at `torch` or `dist`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith(("torch.", "dist.", "fx.")):
                yield dotted


def test_all_rooms_are_read() -> None:
    assert {COMPAT, "zgraph/report/dump.py", "passes/sink_waits.py", "codegen/lower.py"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_imports_go_through_the_doors(name: str) -> None:
    found = list(imports(FILES[name]))
    room = name.split("/")[0]
    assert not [entry for entry in found if entry.split(".")[0] in ("passes", "codegen")]
    if name == COMPAT:
        assert not [entry for entry in found if entry.startswith("zgraph")]
    elif room == "zgraph" and name not in FRONT_DOORS:
        assert not [entry for entry in found if entry.startswith(("zgraph.passes", "zgraph.codegen"))]
    elif room in ("passes", "codegen"):
        other = "zgraph.codegen" if room == "passes" else "zgraph.passes"
        assert not [entry for entry in found if entry.startswith((other, "zgraph.backend"))]


@pytest.mark.parametrize("name", [name for name in FILES if name != COMPAT])
def test_private_torch_names_stay_in_torch_compat(name: str) -> None:
    used = [*imports(FILES[name]), *attributes(FILES[name])]
    private = [
        entry
        for entry in used
        if entry.split(".")[0] in ("torch", "functorch", "dist", "fx")
        # torch.ops.aten._to_copy is an operator, not a private Python name.
        and not entry.startswith(("torch.ops.aten", "torch.ops.zgraph"))
        and any(part.startswith("_") and not part.endswith("__") for part in entry.split("."))
    ]
    assert private == []


@pytest.mark.parametrize("name", FILES)
def test_there_is_no_module_state(name: str) -> None:
    tree = FILES[name]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, mutable):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assert [ast.unparse(target) for target in targets] in (["__all__"], ["_SHORT"]), ast.unparse(node)
