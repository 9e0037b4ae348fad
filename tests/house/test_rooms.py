"""The rooms of the house: which may import which, what stays inside of one, and how large they are."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from setuptools import find_packages

import zgraph
from tests.support.sources import PRODUCT, ROOT

# From the ground up: a file may import what lies in its own room, or in one further up in this list.
ROOMS = (
    "zgraph.errors",
    "zgraph.torch_compat",
    "zgraph.tiers.disk",
    "zgraph.tiers",
    "zgraph.tiers.placement",
    "zgraph.runtime",
    "zgraph.runtime.exchanges",
    "zgraph.compression",
    "zgraph.dialect",
    "zgraph.graph",
    "zgraph.analysis",
    "zgraph.scheduling",
    "zgraph.scheduling.lifetimes",
    "zgraph.sharding.meshes",
    "zgraph.sharding.context",
    "zgraph.sharding.model",
    "zgraph.sharding.tensors",
    "zgraph.sharding",
    "zgraph.sharding.pipeline",
    "zgraph.optimizers",
    "zgraph.checkpoint",
    "zgraph.compiler",
    "zgraph.reporting.data",
    "zgraph.reporting",
    "zgraph.reporting.metrics",
    "zgraph.reporting.page",
    "zgraph.reporting.export",
    "zgraph.passes.common",
    "zgraph.passes.compute",
    "zgraph.passes.memory",
    "zgraph.passes.step",
    "zgraph.passes",
    "zgraph.codegen.kernels",
    "zgraph.codegen.kernels.triton",
    "zgraph.codegen.kernels.cpu",
    "zgraph.codegen.ahead",
    "zgraph.codegen",
    "zgraph.driver.saved_plans",
    "zgraph.driver",
    "zgraph.step.outside",
    "zgraph.step.lines",
    "zgraph.step.capture",
    "zgraph.step",
    "zgraph.step.outer",
    "zgraph.planner.schedules",
    "zgraph.planner",
    "zgraph.integrations",
    "zgraph.cli",
    "zgraph",  # the package itself: the doors
)
# Rooms side by side, of which neither knows the other, whatever their order above.
APART = (
    ("zgraph.passes", "zgraph.codegen"),
    ("zgraph.codegen.kernels.triton", "zgraph.codegen.kernels.cpu"),
    ("zgraph.passes", "zgraph.reporting"),
    ("zgraph.codegen", "zgraph.reporting"),
)
MOST_FILES = 12
FILES = PRODUCT
USERS = {
    str(path.relative_to(ROOT)): path.read_text()
    for room in ("tests", "examples")
    for path in sorted((ROOT / room).rglob("*.py"))
}
COMPAT = "zgraph/torch_compat/"


def module_of(name: str) -> str:
    """The module that a file is imported as; the rooms at the top are imported as zgraph.passes and zgraph.codegen."""
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "zgraph" else ["zgraph", *parts])


MODULES = frozenset(map(module_of, FILES))


def room_of(entry: str) -> str:
    """The room of what an import names: of "zgraph.graph.meta.create" it is "zgraph.graph"."""
    module = next(part for part in prefixes(entry) if part in MODULES)
    return next(part for part in prefixes(module) if part in ROOMS)


def prefixes(entry: str) -> list[str]:
    """A dotted name and all that it lies in, the longest first."""
    parts = entry.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def names_used(name: str, source: str) -> list[str]:
    """Every module and name that a file imports, also while it runs, and every attribute it reads of one, in full."""
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            used += imported_by(node)
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


def imported_by(call: ast.Call) -> list[str]:
    """What `importlib.import_module` imports, or the room of it: the part of an f-string before its first value."""
    given = call.args[0] if call.args else None
    first = given.values[0] if isinstance(given, ast.JoinedStr) and given.values else given
    return [first.value.rstrip(".")] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []


def within(entry: str, *modules: str) -> bool:
    return any(entry == module or entry.startswith(f"{module}.") for module in modules)


def wrong_imports(name: str, source: str) -> list[str]:
    """What a file imports from a room that lies above its own, or beside it."""
    used = [entry for entry in names_used(name, source) if within(entry, "zgraph", "passes", "codegen")]
    here = room_of(module_of(name)) if module_of(name) in MODULES else module_of(name).rpartition(".")[0]
    return [entry for entry in used if not may_enter(here, entry)]


def may_enter(here: str, entry: str) -> bool:
    if not within(entry, "zgraph"):  # a global package called passes or codegen, which nothing installs
        return False
    there = room_of(entry)
    if there == "zgraph" and entry == "zgraph" and here == "zgraph":
        return True
    apart = any(
        (within(here, one) and within(there, other)) or (within(here, other) and within(there, one))
        for one, other in APART
    )
    return not apart and ROOMS.index(there) <= ROOMS.index(here)


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


def offenders(rule: Callable[[str, str], list[str]], files: dict[str, str]) -> dict[str, list[str]]:
    """What breaks a rule, by file: one message for all of them."""
    return {name: found for name, source in files.items() if (found := rule(name, source))}


def foreign_rooms(name: str, source: str) -> list[str]:
    return [entry for entry in names_used(name, source) if within(entry, "passes", "codegen")]


def test_all_rooms_are_read() -> None:
    assert set(ROOMS) == {room_of(module) for module in MODULES}
    assert not [name for name in FILES if name.startswith(("zgraph/passes", "zgraph/codegen"))]


def test_imports_go_one_way() -> None:
    assert offenders(wrong_imports, FILES) == {}


def test_rooms_stay_small() -> None:
    files = Counter(room_of(module_of(name)) for name in FILES if not name.endswith("__init__.py"))
    assert {room: count for room, count in files.items() if count > MOST_FILES} == {}
    assert len([room for room in ROOMS if (ROOT / room.replace(".", "/")).is_dir() and room.count(".") == 1]) <= 20


def test_private_torch_names_stay_in_torch_compat() -> None:
    others = {name: source for name, source in FILES.items() if not name.startswith(COMPAT)}
    assert offenders(private_torch_names, others) == {}


def test_there_is_no_module_state() -> None:
    assert offenders(module_state, FILES) == {}


def test_passes_and_codegen_are_imported_as_parts_of_zgraph() -> None:
    assert offenders(foreign_rooms, USERS) == {}


def other_tests(name: str, source: str) -> list[str]:
    """What a file imports from a test file, which is for tests/support to give."""
    parts = {entry: entry.split(".") for entry in names_used(name, source)}
    return [entry for entry in parts if "tests" in parts[entry] and any(p.startswith("test_") for p in parts[entry])]


def test_tests_share_what_lies_in_support() -> None:
    assert offenders(other_tests, USERS) == {}
    helpers = [name for name in USERS if name.startswith("tests/") and not name.startswith("tests/support/")]
    names = {Path(name).name for name in helpers}
    assert {name for name in names if not name.startswith("test_")} == {"__init__.py", "conftest.py"}


def test_the_package_has_the_names_of_its_list() -> None:
    """Type checkers read the list, and names are imported from it when they are first asked for."""
    assert len(zgraph.__all__) > 40 and {"shard", "passes", "Tier"} <= set(zgraph.__all__)
    assert [name for name in zgraph.__all__ if not hasattr(zgraph, name)] == []
    assert set(zgraph.__all__) <= set(dir(zgraph))
    with pytest.raises(AttributeError, match="'zgraph' has no attribute 'shards'"):
        _ = zgraph.shards


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (wrong_imports, "zgraph/graph/meta.py", "from zgraph.passes import presets"),
        (wrong_imports, "zgraph/graph/meta.py", "from zgraph import codegen"),
        (wrong_imports, "zgraph/graph/meta.py", "from ..passes.presets import default"),
        (wrong_imports, "zgraph/graph/meta.py", "from zgraph.analysis.cost import CostModel"),
        (wrong_imports, "zgraph/graph/meta.py", "from zgraph.analysis import cost"),
        (wrong_imports, "zgraph/graph/meta.py", "import zgraph"),
        (wrong_imports, "zgraph/reporting/dump.py", "from ..passes import presets"),
        (wrong_imports, "zgraph/reporting/dump.py", "def late():\n    import zgraph.codegen.lower_fx"),
        (wrong_imports, "zgraph/reporting/dump.py", "import zgraph\nzgraph.passes.presets.default()"),
        (
            wrong_imports,
            "zgraph/sharding/model/codes.py",
            'import importlib\nimportlib.import_module("zgraph.codegen")',
        ),
        (
            wrong_imports,
            "zgraph/sharding/model/codes.py",
            'from importlib import import_module\nimport_module("zgraph.passes")',
        ),
        (
            wrong_imports,
            "zgraph/sharding/model/codes.py",
            'import importlib\nimportlib.import_module(f"zgraph.codegen.{x}")',
        ),
        (wrong_imports, "zgraph/torch_compat/aot.py", "from zgraph.graph import meta"),
        (wrong_imports, "zgraph/torch_compat/aot.py", "from ..graph import meta"),
        (wrong_imports, "zgraph/driver/backend.py", "from passes import presets"),
        (wrong_imports, "passes/sink_waits.py", "from zgraph.codegen.lower_fx import lower_fx"),
        (wrong_imports, "passes/sink_waits.py", "from ..codegen import lower_fx"),
        (wrong_imports, "passes/sink_waits.py", "from zgraph import backend"),
        (wrong_imports, "passes/common/bucket_costs.py", "from zgraph.passes.sink_waits import SinkWaits"),
        (wrong_imports, "codegen/lower_fx.py", "import zgraph.passes"),
        (wrong_imports, "codegen/lower_fx.py", "from zgraph.driver.backend import zgraph"),
        (wrong_imports, "codegen/kernels/cpu/blocks.py", "from zgraph.codegen.kernels.triton import tables"),
        (private_torch_names, "zgraph/graph/meta.py", "from torch._guards import detect_fake_mode"),
        (
            private_torch_names,
            "zgraph/graph/meta.py",
            "from torch.distributed.distributed_c10d import _get_default_store",
        ),
        (private_torch_names, "zgraph/graph/meta.py", "import torch._dynamo"),
        (private_torch_names, "zgraph/graph/meta.py", "import torch\ntorch._C._get_tracing_state()"),
        (private_torch_names, "zgraph/graph/meta.py", "import torch\ntorch.ops._c10d_functional.wait_tensor.default"),
        (
            private_torch_names,
            "zgraph/graph/meta.py",
            "import torch\nops = torch.ops\nops._c10d_functional.wait_tensor",
        ),
        (private_torch_names, "zgraph/graph/meta.py", "import torch.distributed as net\nnet._functional_collectives"),
        (private_torch_names, "zgraph/graph/meta.py", "from torch import Tensor as T\nT._make_subclass"),
        (other_tests, "tests/test_windows.py", "from tests.runtime.test_memory import local"),
        (other_tests, "tests/support/graphs.py", "from tests.passes import test_sink_waits"),
        (other_tests, "tests/passes/test_sink_waits.py", "from .test_hoist_starts import world"),
        (module_state, "zgraph/graph/meta.py", "def f():\n    global count"),
        (module_state, "zgraph/graph/meta.py", "cache = {}"),
        (module_state, "zgraph/graph/meta.py", "cache: list[int] = [0]"),
        (module_state, "zgraph/graph/meta.py", "cache = dict[str, int]()"),
        (module_state, "zgraph/graph/meta.py", "cache = weakref.WeakKeyDictionary()"),
        (module_state, "zgraph/graph/meta.py", "cache = collections.defaultdict(list)"),
    ],
)
def test_each_rule_finds_what_breaks_it(rule: Callable[[str, str], list[str]], name: str, source: str) -> None:
    assert len(rule(name, source)) > 0


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (wrong_imports, "zgraph/driver/backend.py", "from zgraph.passes import presets"),
        (wrong_imports, "passes/presets.py", "from zgraph.passes.sink_waits import SinkWaits"),
        (wrong_imports, "passes/presets.py", "from .sink_waits import SinkWaits"),
        (wrong_imports, "zgraph/graph/meta.py", "from zgraph.torch_compat.fake_values import fake_mode_of"),
        (wrong_imports, "zgraph/graph/meta.py", "from zgraph.errors import ZgraphError"),
        (wrong_imports, "zgraph/__init__.py", 'import importlib\nimportlib.import_module("zgraph.codegen")'),
        (private_torch_names, "zgraph/graph/meta.py", "import torch\naten = torch.ops.aten\naten._to_copy.default"),
        (private_torch_names, "zgraph/graph/meta.py", "import torch\ntorch.__version__"),
        (module_state, "zgraph/graph/meta.py", "__all__ = ['shard']"),
        (module_state, "zgraph/graph/meta.py", "fixed = frozenset({1, 2})"),
    ],
)
def test_no_rule_forbids_what_is_allowed(rule: Callable[[str, str], list[str]], name: str, source: str) -> None:
    assert rule(name, source) == []


def test_every_room_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = find_packages(str(ROOT), **setuptools["packages"]["find"])
    assert sorted(found) == sorted(set(ROOMS) - {"zgraph.errors"})  # which is a file
