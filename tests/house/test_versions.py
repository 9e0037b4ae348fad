"""Which torch zgraph accepts, which one the tests run on, and what importing zgraph must not load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import zgraph
from tests.support import breakages
from zgraph.torch_compat import (
    NEWEST,
    OLDEST,
    exists,
    missing_names,
    names_in,
    release_of,
    require_supported_torch,
)

ROOT = Path(__file__).parents[2]

COMPILE_A_LINEAR = """
import torch, zgraph
model = torch.compile(torch.nn.Linear(4, 4), backend="zgraph", options={"lowering": "fx"})
model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0+cu128", "2.12.1", "2.13.0+cpu", "2.13.0a0+gitabcdef", "2.14.1+cu130", "2.15.0"]
)
def test_checked_versions_pass(version: str):
    require_supported_torch(version)  # a warning would be an error here


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.13.1", "zgraph: torch 1.13.1 is too old; install torch>=2.11,<2.16."),
        ("2.9.0", "zgraph: torch 2.9.0 is too old; install torch>=2.11,<2.16."),
        ("2.10.1+cu128", "zgraph: torch 2.10.1+cu128 is too old; install torch>=2.11,<2.16."),
        ("", "zgraph: cannot read the torch version ''; install torch>=2.11,<2.16."),
        ("parrot", "zgraph: cannot read the torch version 'parrot'; install torch>=2.11,<2.16."),
    ],
)
def test_other_versions_are_refused(version: str, message: str):
    with pytest.raises(ImportError) as error:
        require_supported_torch(version)
    assert str(error.value) == message


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270301+cpu", "3.0.0"])
def test_newer_versions_are_warned_of(version: str):
    with pytest.warns(zgraph.ZgraphWarning) as warned:
        require_supported_torch(version)
    assert [str(one.message) for one in warned if one.category is zgraph.ZgraphWarning] == [
        f"zgraph: torch {version} is newer than the newest that this zgraph was checked with, 2.15; compare the first "
        "steps with those of the plain model, or install torch>=2.11,<2.16 or a newer zgraph."
    ]


def test_a_newer_version_that_lacks_a_name_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("torch._functorch.partitioners.get_default_op_list")
    monkeypatch.delattr("torch._C._storage_Use_Count")
    with pytest.raises(ImportError) as error:
        require_supported_torch("2.16.0")
    assert str(error.value) == (
        "zgraph: torch 2.16.0 lacks names that zgraph uses: torch._functorch.partitioners.get_default_op_list, "
        "torch._C._storage_Use_Count; install torch>=2.11,<2.16 or a newer zgraph."
    )


def test_import_refuses_an_unsupported_torch():
    found = run_python("import torch; torch.__version__ = '2.9.0'; import zgraph")
    assert found.returncode != 0
    assert "ImportError: zgraph: torch 2.9.0 is too old; install torch>=2.11,<2.16." in found.stderr


# A process that compiles takes many seconds; make test TORCH=... compiles with each torch that there is.
@pytest.mark.parametrize("program", ["", COMPILE_A_LINEAR], ids=["imports", "compiles"])
def test_a_newer_torch_costs_one_warning(program: str):
    found = run_python(f"import torch; torch.__version__ = '2.16.0'; import zgraph\n{program}\nprint('ran')")
    assert (found.returncode, found.stdout) == (0, "ran\n"), found.stderr
    assert found.stderr.count("ZgraphWarning: zgraph: torch 2.16.0 is newer than") == 1


def test_this_torch_has_every_name_that_is_used():
    assert missing_names() == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._guards import detect_fake_mode as f", ["torch._guards.detect_fake_mode"]),
        ("import torch\ntorch._C._is_there()", ["torch._C._is_there"]),
        ("import torch.distributed as dist\ndist._world.pg_map[0]", ["torch.distributed._world.pg_map"]),
        ("def f():\n    from torch import _a\ndef g():\n    _a.b", ["torch._a"]),
        ("import torch\ntorch._made().attribute", ["torch._made"]),
        ("import functorch.compile\nfunctorch.compile.cut", ["functorch.compile.cut"]),
        ("import os\nos.path.join\nfrom zgraph.graph import meta\nmeta.create", []),
    ],
)
def test_names_of_torch_are_found_in_source(source: str, names: list[str]):
    assert list(names_in(ast.parse(source))) == names


def test_names_that_are_not_there_are_found():
    assert exists("torch._inductor.compile_fx.compile_fx_inner")  # of a module that nothing may have imported yet
    assert not any(map(exists, ["torch._C._nothing", "torch._nothing.name", "torch.fx.Graph.nothing.more", "nothing"]))


def test_package_metadata_asks_for_the_oldest():
    """And sets no bound above: a newer torch is a warning."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "torch>={}.{}".format(*OLDEST) in requirements


def test_every_series_has_its_pins():
    """`make test TORCH=...` installs what a torch needs besides itself: of each that was checked but the pinned one."""
    pinned = release_of(pins()["torch"])
    found = re.findall(r"^OTHER_(\d+)\.(\d+) :=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    checked = [(OLDEST[0], minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
    assert [(int(major), int(minor)) for major, minor in found] == [one for one in checked if one != pinned]


RANKS = """\
tests.support.ranks.RankFailure: --- rank 0
Traceback (most recent call last):
  File "a.py", line 3, in f
    g()
torch.distributed.DistStoreError: wait timeout after 55000ms

--- rank 1
no answer within 10.0 s after rank 0 had failed
"""


def test_the_summary_groups_failures_by_cause():
    head, names, count, *rest = breakages.summary(
        [
            ("tests/test_a.py::test_one", "AssertionError: assert 3 == 4\n  where 3 = f()"),
            ("tests/test_b.py::test_two", RANKS),
            ("tests/test_a.py::test_three", "AssertionError: assert 17 == 5"),
            ("tests/test_c.py::test_four", ""),
        ]
    )
    assert head.startswith(f"torch {torch.__version__}, triton ")
    assert names == "private names that are missing: none"
    assert count == "tests that failed: 4, causes: 3"
    assert rest == [
        "2 x AssertionError: assert 3 == 4",
        "    tests/test_a.py::test_one",
        "    tests/test_a.py::test_three",
        "1 x torch.distributed.DistStoreError: wait timeout after 55000ms",
        "    tests/test_b.py::test_two",
        "1 x no text",
        "    tests/test_c.py::test_four",
    ]


def test_tests_run_on_the_wanted_torch(pytestconfig: pytest.Config):
    """Installing another package can replace torch unnoticed; with a GPU the user's own torch is fine."""
    wanted = pytestconfig.getoption("--torch")
    if wanted is None and torch.cuda.is_available():
        pytest.skip("a machine with a GPU keeps its own torch")
    assert torch.__version__.split("+")[0] == (wanted or pins()["torch"])


def test_every_direct_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(entry for extra in project["optional-dependencies"].values() for entry in extra),
    ]
    names = [re.split(r"[\[<>=!~; ]", entry)[0] for entry in listed]
    assert [name for name in names if name != "zgraph" and name not in pins()] == []


def test_neither_triton_nor_nccl_is_imported():
    found = run_python(
        "import sys, torch, torch.distributed\n"
        # torch.compile itself looks whether there is a Triton, by importing it.
        "torch.compile(torch.nn.Linear(4, 4), backend='aot_eager')(torch.ones(2, 4)).sum().backward()\n"
        "before = set(sys.modules)\n"
        f"{COMPILE_A_LINEAR}\n"
        "new = sorted(set(sys.modules) - before)\n"
        "print([name for name in new if name.split('.')[0] == 'triton' or 'nccl' in name])"
    )
    assert (found.returncode, found.stdout) == (0, "[]\n"), found.stderr


def test_zgraph_works_where_triton_cannot_be_imported():
    found = run_python(f"import sys\nsys.modules['triton'] = None\n{COMPILE_A_LINEAR}\nprint('ran')")
    assert (found.returncode, found.stdout) == (0, "ran\n"), found.stderr


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
