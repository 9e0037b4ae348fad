"""Which torch zgraph accepts, which one the tests run on, and what importing zgraph must not load."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from zgraph.torch_compat import NEWEST, OLDEST, require_supported_torch

ROOT = Path(__file__).parent.parent

COMPILE_A_LINEAR = """
import torch, zgraph
model = torch.compile(torch.nn.Linear(4, 4), backend="zgraph", options={"lowering": "fx"})
model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu128", "2.12.1", "2.13.0+cpu", "2.13.0a0+gitabcdef"])
def test_supported_versions_pass(version: str):
    require_supported_torch(version)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.13.1", "zgraph: torch 1.13.1 is too old; install torch>=2.11,<2.14."),
        ("2.9.0", "zgraph: torch 2.9.0 is too old; install torch>=2.11,<2.14."),
        ("2.10.1+cu128", "zgraph: torch 2.10.1+cu128 is too old; install torch>=2.11,<2.14."),
        (
            "2.14.0",
            "zgraph: torch 2.14.0 is newer than this zgraph was checked with; install torch>=2.11,<2.14 or a newer "
            "zgraph.",
        ),
        (
            "2.14.0.dev20261101+cpu",
            "zgraph: torch 2.14.0.dev20261101+cpu is newer than this zgraph was checked with; install "
            "torch>=2.11,<2.14 or a newer zgraph.",
        ),
        (
            "3.0.0",
            "zgraph: torch 3.0.0 is newer than this zgraph was checked with; install torch>=2.11,<2.14 or a newer "
            "zgraph.",
        ),
        ("", "zgraph: cannot read the torch version ''; install torch>=2.11,<2.14."),
        ("parrot", "zgraph: cannot read the torch version 'parrot'; install torch>=2.11,<2.14."),
    ],
)
def test_other_versions_are_refused(version: str, message: str):
    with pytest.raises(ImportError) as error:
        require_supported_torch(version)
    assert str(error.value) == message


def test_import_refuses_an_unsupported_torch():
    found = run_python("import torch; torch.__version__ = '2.9.0'; import zgraph")
    assert found.returncode != 0
    assert "ImportError: zgraph: torch 2.9.0 is too old; install torch>=2.11,<2.14." in found.stderr


def test_package_metadata_asks_for_the_same_versions():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest, newest) = OLDEST, NEWEST
    assert f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}" in requirements


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


@pytest.mark.slow  # two processes
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


@pytest.mark.slow  # what is not imported, as the test above has it, may be missing
def test_zgraph_works_where_triton_cannot_be_imported():
    found = run_python(f"import sys\nsys.modules['triton'] = None\n{COMPILE_A_LINEAR}\nprint('ran')")
    assert (found.returncode, found.stdout) == (0, "ran\n"), found.stderr


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
