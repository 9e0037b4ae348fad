"""The doors between the rooms: torch_compat <- core <- passes, codegen <- backend."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    f"{room}/{path.relative_to(ROOT / room)}": path.read_text()
    for room in ("zgraph", "passes", "codegen")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
}
USERS = {
    str(path.relative_to(ROOT)): path.read_text()
    for room in ("tests", "examples")
    for path in sorted((ROOT / room).rglob("*.py"))
}
FRONT_DOORS = ("zgraph/__init__.py", "zgraph/backend.py", "zgraph/planning.py")
COMPAT = "zgraph/torch_compat.py"


def names_used(name: str, source: str) -> list[str]:
    """Every module and name that a file imports, and every attribute it reads of one, in full: "torch.fx.Graph"."""
    tree = ast.parse(source)
    # The two rooms at the top are imported as zgraph.passes and zgraph.codegen.
    package = name.removeprefix("zgraph/").split("/")[:-1]
    used: list[str] = []
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                used.append(alias.name)
                meaning[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            above = ["zgraph", *package][: 1 + len(package) - (node.level - 1)] if node.level else []
            for alias in node.names:
                full = ".".join([*above, *([node.module] if node.module else []), alias.name])
                used.append(full)
                meaning[alias.asname or alias.name] = full
    for node in tree.body:  # aten = torch.ops.aten
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            start, _, rest = ast.unparse(node.value).partition(".")
            if start in meaning:
                meaning |= {ast.unparse(target): f"{meaning[start]}.{rest}" for target in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            start, _, rest = ast.unparse(node).partition(".")
            if start in meaning:
                used.append(f"{meaning[start]}.{rest}")
    return used


def within(entry: str, *modules: str) -> bool:
    return any(entry == module or entry.startswith(f"{module}.") for module in modules)


def broken_doors(name: str, source: str) -> list[str]:
    """What a file imports from a room it may not enter."""
    used = names_used(name, source)
    room = name.split("/")[0]
    closed = ["passes", "codegen"]
    if name == COMPAT:
        closed.append("zgraph")
    elif room == "zgraph" and name not in FRONT_DOORS:
        closed += ["zgraph.passes", "zgraph.codegen", "zgraph.backend"]
    elif room in ("passes", "codegen"):
        closed += ["zgraph.codegen" if room == "passes" else "zgraph.passes", "zgraph.backend"]
    return [entry for entry in used if within(entry, *closed)]


def private_torch_names(name: str, source: str) -> list[str]:
    """Private names of torch, however they are imported."""
    return [
        entry
        for entry in names_used(name, source)
        if within(entry, "torch", "functorch")
        # torch.ops.aten._to_copy is an operator, not a private Python name.
        and not within(entry, "torch.ops.aten", "torch.ops.zgraph")
        and any(part.startswith("_") and not part.endswith("__") for part in entry.split("."))
    ]


def module_state(name: str, source: str) -> list[str]:
    """`global` statements, and containers that can change, bound at module level."""
    tree = ast.parse(source)
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Global)]
    literal = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if [ast.unparse(target) for target in targets] != ["__all__"] and (
            isinstance(node.value, literal) or (isinstance(node.value, ast.Call) and _makes_container(node.value))
        ):
            found.append(ast.unparse(node))
    return found


def _makes_container(call: ast.Call) -> bool:
    made = ast.unparse(call.func).split("[")[0].split(".")[-1]
    return made != "frozenset" and made.lower().endswith(("dict", "list", "set", "deque", "counter", "dictionary"))


def test_all_rooms_are_read() -> None:
    assert {COMPAT, *FRONT_DOORS, "zgraph/report/dump.py", "passes/sink_waits.py", "codegen/lower.py"} <= set(FILES)
    assert not [name for name in FILES if name.startswith(("zgraph/passes", "zgraph/codegen"))]


@pytest.mark.parametrize("name", FILES)
def test_imports_go_through_the_doors(name: str) -> None:
    assert broken_doors(name, FILES[name]) == []


@pytest.mark.parametrize("name", [name for name in FILES if name != COMPAT])
def test_private_torch_names_stay_in_torch_compat(name: str) -> None:
    assert private_torch_names(name, FILES[name]) == []


@pytest.mark.parametrize("name", FILES)
def test_there_is_no_module_state(name: str) -> None:
    assert module_state(name, FILES[name]) == []


@pytest.mark.parametrize("name", USERS)
def test_passes_and_codegen_are_imported_as_parts_of_zgraph(name: str) -> None:
    assert not [entry for entry in names_used(name, USERS[name]) if within(entry, "passes", "codegen")]


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (broken_doors, "zgraph/meta.py", "from zgraph.passes import presets"),
        (broken_doors, "zgraph/meta.py", "from zgraph import codegen"),
        (broken_doors, "zgraph/meta.py", "from .passes.presets import default"),
        (broken_doors, "zgraph/report/text.py", "from ..passes import presets"),
        (broken_doors, "zgraph/report/text.py", "def late():\n    import zgraph.codegen.lower_fx"),
        (broken_doors, "zgraph/report/text.py", "import zgraph\nzgraph.passes.presets.default()"),
        (broken_doors, COMPAT, "from zgraph import meta"),
        (broken_doors, COMPAT, "from . import meta"),
        (broken_doors, FRONT_DOORS[1], "from passes import presets"),
        (broken_doors, "passes/sink_waits.py", "from zgraph.codegen.lower_fx import lower_fx"),
        (broken_doors, "passes/sink_waits.py", "from ..codegen import lower"),
        (broken_doors, "passes/sink_waits.py", "from zgraph import backend"),
        (broken_doors, "codegen/lower.py", "import zgraph.passes"),
        (broken_doors, "codegen/lower.py", "from zgraph.backend import zgraph"),
        (private_torch_names, "zgraph/meta.py", "from torch._guards import detect_fake_mode"),
        (private_torch_names, "zgraph/meta.py", "from torch.distributed.distributed_c10d import _get_default_store"),
        (private_torch_names, "zgraph/meta.py", "import torch._dynamo"),
        (private_torch_names, "zgraph/meta.py", "import torch\ntorch._C._get_tracing_state()"),
        (private_torch_names, "zgraph/meta.py", "import torch\ntorch.ops._c10d_functional.wait_tensor.default"),
        (private_torch_names, "zgraph/meta.py", "import torch\nops = torch.ops\nops._c10d_functional.wait_tensor"),
        (private_torch_names, "zgraph/meta.py", "import torch.distributed as net\nnet._functional_collectives"),
        (private_torch_names, "zgraph/meta.py", "from torch import Tensor as T\nT._make_subclass"),
        (module_state, "zgraph/meta.py", "def f():\n    global count"),
        (module_state, "zgraph/meta.py", "cache = {}"),
        (module_state, "zgraph/meta.py", "cache: list[int] = [0]"),
        (module_state, "zgraph/meta.py", "cache = dict[str, int]()"),
        (module_state, "zgraph/meta.py", "cache = weakref.WeakKeyDictionary()"),
        (module_state, "zgraph/meta.py", "cache = collections.defaultdict(list)"),
    ],
)
def test_each_rule_finds_what_breaks_it(rule: Callable[[str, str], list[str]], name: str, source: str) -> None:
    assert len(rule(name, source)) > 0


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (broken_doors, FRONT_DOORS[1], "from zgraph.passes import presets"),
        (broken_doors, "passes/presets.py", "from zgraph.passes.sink_waits import SinkWaits"),
        (broken_doors, "passes/presets.py", "from .sink_waits import SinkWaits"),
        (broken_doors, "zgraph/meta.py", "from zgraph.torch_compat import fake_mode_of"),
        (private_torch_names, "zgraph/meta.py", "import torch\naten = torch.ops.aten\naten._to_copy.default"),
        (private_torch_names, "zgraph/meta.py", "import torch\ntorch.__version__"),
        (module_state, "zgraph/meta.py", "__all__ = ['shard']"),
        (module_state, "zgraph/meta.py", "fixed = frozenset({1, 2})"),
    ],
)
def test_no_rule_forbids_what_is_allowed(rule: Callable[[str, str], list[str]], name: str, source: str) -> None:
    assert rule(name, source) == []
