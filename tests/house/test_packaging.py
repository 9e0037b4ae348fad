"""Wheel, sdist and editable install, each tried in an environment of its own and from another directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
ROOMS = ("zgraph", "passes", "codegen")

USE = """
import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

import torch, zgraph, zgraph.passes, zgraph.codegen

assert [e.value for e in entry_points(group="torch_dynamo_backends", name="zgraph")] == ["zgraph.driver.backend:zgraph"]
for name in ("passes", "codegen"):
    assert importlib.util.find_spec(name) is None, f"a global package {name} was installed"
assert (Path(zgraph.__file__).parent / "py.typed").is_file()
model = torch.nn.Linear(4, 4)
x = torch.ones(2, 4)
compiled = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
assert torch.equal(compiled(x), model(x))
print(zgraph.__file__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what gets packaged, links included: a build leaves files beside its sources."""
    copy = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        unwanted = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(ROOT / room, copy / room, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and a wheel that was built out of the unpacked sdist."""
    dist = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr
    return dist


def test_wheel_holds_every_room_under_zgraph(built: Path):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    modules = sorted(name for name in names if name.endswith(".py"))
    assert modules == expected_modules()
    assert {name.split("/")[0] for name in names} == {"zgraph", f"zgraph-{VERSION}.dist-info"}
    assert "zgraph/py.typed" in names
    assert f"zgraph-{VERSION}.dist-info/licenses/LICENSE" in names


def test_sdist_holds_every_room_under_zgraph(built: Path):
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    assert sorted(name for name in names if name.startswith("zgraph/") and name.endswith(".py")) == expected_modules()
    assert {"LICENSE", "README.md", "pyproject.toml", "zgraph/py.typed"} <= {*names}


@pytest.mark.parametrize("kind", ["wheel", "editable", pytest.param("sdist", marks=pytest.mark.long)])
def test_install_works_from_another_directory(kind: str, source: Path, built: Path, tmp_path: Path):
    if kind == "editable":
        what = ["--editable", str(source)]
    else:
        what = [str(next(built.glob("*.whl" if kind == "wheel" else "*.tar.gz")))]
    python = fresh_environment(tmp_path / "environment")
    # From outside: the environment has no pip of its own, and no index is asked.
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    installed = run([*pip, "--no-build-isolation", *what], tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    used = run([str(python), "-c", USE], tmp_path)
    assert used.returncode == 0, used.stdout + used.stderr
    home = source if kind == "editable" else tmp_path / "environment"
    assert Path(used.stdout.strip()).resolve().is_relative_to(home.resolve())


def expected_modules() -> list[str]:
    """Every module of the rooms by the name it is imported under."""
    rooms = {"zgraph": "zgraph", "passes": "zgraph/passes", "codegen": "zgraph/codegen"}
    # rglob does not follow the links in zgraph/, so each file is found once.
    return sorted(
        f"{name}/{path.relative_to(ROOT / room)}"
        for room, name in rooms.items()
        for path in (ROOT / room).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    )


def fresh_environment(folder: Path) -> Path:
    """A virtual environment that finds torch and setuptools where this one does, but none of this one's .pth files."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
