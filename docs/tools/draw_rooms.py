"""Draw docs/images/rooms.svg: the rooms of the house, from the ground up, and which of them import which.

    python docs/tools/draw_rooms.py            # draw it anew
    python docs/tools/draw_rooms.py --check    # fail where the drawing is not that of the code

The order of the rooms is that of tests/house/test_rooms.py, which enforces it. Needs nothing but Python.
"""

from __future__ import annotations

import ast
import html
import textwrap
from collections.abc import Collection, Iterable
from pathlib import Path

from generated import keep_up

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
DOOR = "zgraph"  # the package itself: the public names, the backend, the planner
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN, LETTERS = 250, 94, 28, 46, 20, 37


def main() -> int:
    return keep_up({PICTURE: draw(rooms(), imports())})


def order() -> list[str]:
    """Names of the outer rooms in the order of test_rooms.py, the lowest first."""
    tree = ast.parse((ROOT / "tests" / "house" / "test_rooms.py").read_text())
    (value,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["ROOMS"]
    ]
    listed: list[str] = ast.literal_eval(value)
    return [name for name in listed if room_of(name) == name]


def room_of(module: str) -> str:
    """The room of a module: "zgraph.passes" is that of "zgraph.passes.common.merge_collectives"."""
    parts = module.split(".")
    if parts[:2] == ["zgraph", "errors"]:
        return "zgraph.errors"
    return ".".join(parts[:2]) if folder_of(".".join(parts[:2])).is_dir() else DOOR


def folder_of(room: str) -> Path:
    """Where a room lies; zgraph.passes and zgraph.codegen are links to the folders at the top."""
    name = room.removeprefix("zgraph.")
    return ROOT / name if name in ("passes", "codegen") else ROOT / room.replace(".", "/")


def files_of(room: str) -> list[Path]:
    if room == "zgraph.errors":
        return [ROOT / "zgraph" / "errors.py"]
    if room == DOOR:
        return [path for path in sorted((ROOT / "zgraph").glob("*.py")) if path.name != "errors.py"]
    return sorted(folder_of(room).rglob("*.py"))


def rooms() -> dict[str, str]:
    """What each room is for, as its docstring says."""
    found: dict[str, str] = {}
    for room in order():
        files = files_of(room)
        first = files[0] if room == "zgraph.errors" else files[0].parent / "__init__.py"
        text = ast.get_docstring(ast.parse(first.read_text())) or ""
        found[room] = text.split("\n\n")[0].replace("\n", " ")
    return found


def imports() -> dict[str, dict[str, None]]:
    """For each room the rooms that its files import."""
    found: dict[str, dict[str, None]] = {room: {} for room in order()}
    for room in found:
        for path in files_of(room):
            used = (room_of(name) for name in imported(path) if name.split(".")[0] == "zgraph")
            found[room] |= dict.fromkeys(other for other in used if other != room)
    return found


def imported(path: Path) -> Iterable[str]:
    """Modules that a file imports, whether at its top or later. Relative imports are not used here."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if node.module == "zgraph" and room_of(full) != DOOR else node.module


def floors(used: dict[str, dict[str, None]]) -> dict[str, int]:
    """The floor of each room: one above the highest that it imports."""
    found: dict[str, int] = {}
    for room in used:  # the lowest first: what it imports comes before it
        found[room] = 1 + max((found[other] for other in used[room]), default=-1)
    return found


def needed(used: dict[str, dict[str, None]]) -> list[tuple[str, str]]:
    """Imports without those that follow from others: where a imports b and b imports c, "a imports c" is left out."""
    above = {room: reachable(used, room) for room in used}
    return [
        (room, other)
        for room, others in used.items()
        for other in others
        if not any(other in above[between] for between in others if between != other)
    ]


def reachable(used: dict[str, dict[str, None]], room: str) -> set[str]:
    found, pending = set[str](), [*used[room]]
    while pending:
        other = pending.pop()
        if other not in found:
            found.add(other)
            pending.extend(used[other])
    return found


def places(used: dict[str, dict[str, None]]) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Upper left corner of each room's box, and width and height of the whole.

    On a floor rooms stand in the order of what they need below, so that few arrows cross.
    """
    of_room, below = floors(used), needed(used)
    by_floor = [[room for room in used if of_room[room] == floor] for floor in range(max(of_room.values()) + 1)]
    widest = max(map(len, by_floor))
    width = 2 * MARGIN + widest * WIDTH + (widest - 1) * GAP_X
    height = 2 * MARGIN + len(by_floor) * HEIGHT + (len(by_floor) - 1) * GAP_Y
    found: dict[str, tuple[int, int]] = {}

    def middle_of_needed(room: str) -> float:
        lefts = [found[other][0] for above, other in below if above == room]
        return sum(lefts) / max(len(lefts), 1)

    for floor, row in enumerate(by_floor):
        left = (width - len(row) * WIDTH - (len(row) - 1) * GAP_X) // 2
        top = height - MARGIN - (floor + 1) * HEIGHT - floor * GAP_Y
        corners = [(left + place * (WIDTH + GAP_X), top) for place in range(len(row))]
        found |= dict(zip(sorted(row, key=middle_of_needed), corners, strict=True))
    return found, width, height


def draw(purposes: dict[str, str], used: dict[str, dict[str, None]]) -> str:
    """The picture as SVG."""
    corners, width, height = places(used)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#7a8699"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    lines += [arrow(corners[room], corners[other], corners.values()) for room, other in needed(used)]
    for room, purpose in purposes.items():
        lines += box(room, purpose, *corners[room])
    return "\n".join([*lines, "</svg>", ""])


def arrow(above: tuple[int, int], below: tuple[int, int], corners: Collection[tuple[int, int]]) -> str:
    """From the bottom of one box to the top of another, past those between them."""
    x, y = above[0] + WIDTH // 2, above[1] + HEIGHT
    goal = below[0] + WIDTH // 2
    path = f"M{x} {y}"
    between = sorted({top for _, top in corners if above[1] < top < below[1]})
    for top in between:
        lefts = sorted(left for left, other in corners if other == top)
        gaps = [left - GAP_X // 2 for left in [*lefts, lefts[-1] + WIDTH + GAP_X]]
        gap = min(gaps, key=lambda gap: abs(gap - x) + abs(gap - goal))
        path += bend(x, y, gap, top) + f" V{top + HEIGHT}"
        x, y = gap, top + HEIGHT
    path += bend(x, y, goal, below[1] - 1)
    return f'<path d="{path}" fill="none" stroke="#7a8699" stroke-width="1.3" marker-end="url(#tip)"/>'


def bend(x: int, y: int, to_x: int, to_y: int) -> str:
    middle = (y + to_y) // 2
    return f" C{x} {middle} {to_x} {middle} {to_x} {to_y}"


def box(room: str, purpose: str, left: int, top: int) -> list[str]:
    name = "zgraph (the door)" if room == DOOR else room.removeprefix("zgraph.")
    fill = "#e8eefc" if room in ("zgraph.passes", "zgraph.codegen") else "#f5f6f8"
    text = textwrap.wrap(purpose.replace("`", ""), LETTERS)
    text = text if len(text) <= 4 else [*text[:3], textwrap.shorten(" ".join(text[3:]), LETTERS, placeholder=" ...")]
    return [
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#3c4a5f"/>',
        f'<text x="{left + 10}" y="{top + 21}" font-size="14" font-weight="600" fill="#1b2430">{name}</text>',
        *(line_of(line, left + 10, top + 39 + 14 * row) for row, line in enumerate(text)),
    ]


def line_of(text: str, x: int, y: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="11.5" fill="#333f4f">{html.escape(text)}</text>'


if __name__ == "__main__":
    raise SystemExit(main())
