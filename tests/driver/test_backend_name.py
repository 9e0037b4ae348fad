"""`backend="zgraph"` is known wherever `import zgraph` works, installed or not, whatever has asked Dynamo before."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = """Metadata-Version: 2.1
Name: zgraph
Version: 9.9
"""
ENTRY_POINTS = "[torch_dynamo_backends]\nzgraph = zgraph.driver.backend:zgraph\n"
COMPILE = """
model = torch.nn.Linear(4, 4)
x = torch.ones(2, 4)
assert torch.equal(torch.compile(model, backend="zgraph", options={"lowering": "fx"})(x), model(x))
"""
# Dynamo looks for entry points once, when a name is asked for that it does not have.
ASKED_BEFORE = "import torch._dynamo\nassert 'zgraph' not in torch._dynamo.list_backends()\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has all packages of this one but zgraph."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    borrowed = Path(sysconfig.get_paths()["purelib"])
    for entry in borrowed.iterdir():
        if "zgraph" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def run(python: Path, program: str, *paths: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [python, "-c", program], env=environment, cwd="/", capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Each starts a process that loads torch and compiles. The way that most take is fast.
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("import zgraph, torch\nassert 'torch._dynamo' not in sys.modules\n", id="before-dynamo"),
        pytest.param("import torch\n" + ASKED_BEFORE + "import zgraph\n", id="behind-dynamo"),
    ],
)
def test_a_checkout_is_known_once_it_is_imported(python: Path, before: str) -> None:
    count = "print(torch._dynamo.list_backends().count('zgraph'))"
    assert run(python, f"import sys\n{before}{COMPILE}{count}", ROOT) == "1"


def test_an_installed_zgraph_comes_first(python: Path, tmp_path: Path) -> None:
    """Entry point and checkout at once: neither registers a second time, and the installed version is the one told."""
    described = tmp_path / "zgraph-9.9.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(INSTALLED)
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    told = "from importlib.metadata import version\nprint(version('zgraph'))"
    assert run(python, f"import torch, zgraph\n{COMPILE}{told}", ROOT, tmp_path) == "9.9"
    listed = "import torch._dynamo\ntorch._dynamo.list_backends()\nimport zgraph\n"
    assert run(python, f"import torch\n{listed}{COMPILE}{told}", ROOT, tmp_path) == "9.9"


def test_who_asks_what_is_installed_is_told_so(python: Path, tmp_path: Path) -> None:
    program = (
        "import zgraph\nfrom importlib.metadata import distributions\n"
        f"print([*distributions(path=[{str(tmp_path)!r}]), *distributions(name='zgraph')])"
    )
    assert run(python, program, ROOT) == "[]"
