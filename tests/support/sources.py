"""The product's source files, by their paths in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = {
    f"{room}/{path.relative_to(ROOT / room)}": path.read_text()
    for room in ("zgraph", "passes", "codegen")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
}
