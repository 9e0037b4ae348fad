"""The command `zgraph`: what it prints, its exit status, and errors of whoever types it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

import zgraph
from tests.support import torchrun
from tests.support.budget import long
from zgraph.analysis.hardware import Hardware
from zgraph.cli.calibrate import table_of
from zgraph.cli.commands import commands
from zgraph.cli.plan import ByteSize
from zgraph.cli.terminal import print_tables
from zgraph.reporting.tables import Table, size

ROOT = Path(__file__).resolve().parents[2]
STEP = """
import torch
from torch import nn

print("made by a module")

def step():
    print("made by a function")
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), (torch.zeros(4, 8),)

def stages():
    return [nn.Linear(8, 8), nn.Linear(8, 8)], (torch.zeros(4, 8),)

def wide():
    return step()[0], (torch.zeros(4, 9),)

def number():
    return 3

def failing():
    raise KeyError("no batch")

class Held:
    step = staticmethod(step)

text = "step"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module, as the current one; nothing is kept in the real home."""
    (tmp_path / "users_step.py").write_text(STEP)
    (tmp_path / "broken_step.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("users_step", "broken_step"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def typed(*words: str) -> Result:
    found = CliRunner().invoke(commands, words)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def run(folder: Path, *words: str, python: tuple[str, ...] = ("-m", "zgraph"), **variables: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *python, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def refused(found: Result, status: int = 2) -> str:
    """The one line of an error."""
    assert (found.exit_code, found.stdout) == (status, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith("zgraph")
    return line


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_lists_the_commands() -> None:
    for words in (["--help"], []):
        found = typed(*words)
        assert found.exit_code == 0
        for name in ("doctor", "calibrate", "plan"):
            assert f"\n  {name}" in found.stdout


def test_help_needs_no_torch(tmp_path: Path) -> None:
    """Which takes seconds to load."""
    program = (
        "import sys, zgraph.cli.commands as line\n"
        "try: line.commands(['--help'])\n"
        "except SystemExit as stopped: print(stopped.code, 'torch' in sys.modules, 'rich' in sys.modules)"
    )
    found = run(tmp_path, "-c", program, python=())
    assert found.stdout.splitlines()[-1] == "0 False False", found.stderr


def test_help_of_every_command_names_its_options() -> None:
    for name, command in commands.commands.items():
        shown = typed(name, "--help").stdout
        assert "--json" in shown
        assert [each.opts for each in command.params if isinstance(each, click.Option) and not each.help] == []


def test_without_its_libraries_it_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['rich'] = None; import runpy; runpy.run_module('zgraph', run_name='__main__')"
    found = run(tmp_path, "-c", program, python=())
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "zgraph: the command line needs rich; pip install 'zgraph[cli]'.\n"


def test_commands_in_the_docs_are_typed_right() -> None:
    """Each names a command and options that there are."""
    lines = re.findall(r"^    .*?zgraph ((?:[a-z].*?)?)\s*(?:#.*)?$", (ROOT / "docs/command-line.md").read_text(), re.M)
    assert {line.split()[0] for line in lines} == {*commands.commands}
    for line in lines:
        name, *words = shlex.split(line)
        commands.commands[name].make_context(name, words)


def test_an_unknown_command_is_refused_in_one_line() -> None:
    assert "No such command 'parrot'" in refused(typed("parrot"))


def test_a_reader_that_goes_away_is_no_traceback(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zgraph", "plan", "--help"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == ""
    assert process.wait() == 1


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_prints_what_zgraph_plan_finds(folder: Path) -> None:
    words = ("plan", "users_step:step", "--world-size", "4", "--hardware", "cpu")
    found = typed(*words, "--json")
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)

    import users_step  # pyright: ignore[reportMissingImports]

    expected = zgraph.plan(
        lambda: users_step.step()[0], batch=lambda: users_step.step()[1], world_size=4, hardware="cpu"
    )
    assert document == expected.as_json()
    assert (document["world_size"], document["fits"]) == (4, True)
    shown = typed(*words)
    assert size(expected.peak_bytes) in shown.stdout and "backward" in shown.stdout
    assert "made by" not in shown.stdout


def test_plan_takes_the_axes_of_a_pipeline(folder: Path) -> None:
    words = ("plan", "users_step:stages", "--world", "pp=2,dp=2", "--micro-batches", "4", "--hardware", "cpu")
    found = json.loads(typed(*words, "--json").stdout)
    assert found["axes"] == {"pp": 2, "dp": 2} and found["pipeline"]["micro_batches"] == 4


def test_plan_covers_the_optimizer_where_it_is_asked_to(folder: Path) -> None:
    words = ("plan", "users_step:step", "--world-size", "4", "--hardware", "cpu")
    found = json.loads(typed(*words, "--json", "--optimizer", "adamw").stdout)
    assert [graph["direction"] for graph in found["graphs"]] == ["step"]
    assert found["optimizer"] == "AdamW" and found["moment_bytes"] > 2 * found["parameter_bytes"]
    assert "step with SGD" in typed(*words, "--optimizer", "sgd").stdout
    assert "'--optimizer': 'lion' is not one of" in typed(*words, "--optimizer", "lion").stderr


def test_plan_takes_options_of_shard_and_a_calibrated_machine(folder: Path) -> None:
    (folder / "machine.json").write_text(Hardware.preset("a100").to_json())
    words = ("plan", "users_step:Held.step", "--world-size", "4", "--hardware", "machine.json", "--json")
    whole, half = (
        json.loads(typed(*words, "--zero-stage", stage, "--param-dtype", dtype).stdout)
        for stage, dtype in (("0", "float32"), ("3", "bfloat16"))
    )
    assert whole["hardware"] == half["hardware"] == "a100"
    assert half["parameter_bytes"] * 4 == whole["parameter_bytes"]
    assert half["sent_bytes"] < whole["sent_bytes"] * 3 / 2


def test_plan_keeps_within_a_budget_or_says_what_would_do(folder: Path) -> None:
    words = ("plan", "users_step:step", "--world-size", "4", "--hardware", "cpu", "--json", "--budget")
    assert json.loads(typed(*words, "1MiB").stdout)["step_bytes"] <= 2**20
    found = typed(*words, "10")
    assert found.exit_code == 1
    assert "does not fit into budget_bytes=10. The smallest budget" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["users_step:step", "--world-size", "0"], "'--world-size': 0 is not in the range"),
        (["users_step:step"], "Write the number of ranks as --world-size 64, or their axes as --world pp=4,dp=16"),
        (["users_step:step", "--world-size", "2", "--world", "dp=2"], "Write the number of ranks as --world-size 64"),
        (["users_step:step", "--world", "dp"], "'dp' names no axes with their sizes; write them as pp=4,dp=8"),
        (["users_step:step", "--world", "dp=2,dp=2"], "'dp=2,dp=2' names no axes"),
        (["users_step:step", "--world", "dp=2,tp=2"], "This command cannot split a model over tp"),
        (["users_step:step", "--world", "dp=0"], "world has 0 ranks on its axis 'dp'; write a number from 1 on"),
        (["users_step:step", "--world", "db=2"], "'db'"),
        (["--world-size", "2"], "Missing argument 'MODULE:FN'"),
        (["not_a_module:step", "--world-size", "2"], "there is no module 'not_a_module' here"),
        (["users_step.inner:step", "--world-size", "2"], "there is no module 'users_step.inner' here"),
        (["broken_step:step", "--world-size", "2"], "No module named 'a_package_that_is_not_there' (broken_step.py:1)"),
        (["users_step:steps", "--world-size", "2"], "module 'users_step' has no function 'steps'"),
        (["users_step:text", "--world-size", "2"], "users_step:text is a str, not a function"),
        (["users_step", "--world-size", "2"], "write MODULE:FN, such as train:step"),
        (["users_step.py:step", "--world-size", "2"], "write users_step:step"),
        (["users_step:step", "--world-size", "2", "--budget", "3 parsecs"], "'3 parsecs' is not a size"),
        (["users_step:step", "--world-size", "2", "--hardware", "h10"], "did you mean 'h100'?"),
        (["users_step:step", "--world-size", "2", "--hardware", "users_step.py"], "not valid JSON"),
        (["users_step:step", "--world-size", "2", "--hardware", "nofile.json"], "there is no file 'nofile.json' with"),
        (["users_step:step", "--world-size", "2", "--hardware", "."], "there is no file '.' with hardware; write one"),
    ],
)
def test_plan_refuses_in_one_line(folder: Path, words: list[str], message: str) -> None:
    found = typed("plan", *words)
    lines = [line for line in found.stderr.splitlines() if not line.startswith("made by")]
    assert (found.exit_code, found.stdout, len(lines)) == (2, "", 1), found.stderr
    assert message in lines[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "the function returned int; return a model and the tuple"),
        ("failing", "the function failed: KeyError: 'no batch' (users_step.py:"),
        ("wide", "the step cannot be compiled: RuntimeError"),  # and what torch says of it, in the words of its version
    ],
)
def test_plan_says_what_a_users_function_did_wrong(folder: Path, name: str, message: str) -> None:
    found = typed("plan", f"users_step:{name}", "--world-size", "2")
    assert (found.exit_code, found.stdout) == (2, "")
    assert message in found.stderr.splitlines()[-1]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("text", "count"),
    [("64", 64), ("64B", 64), ("60GiB", 60 * 2**30), ("1.5 gb", 1.5e9), ("512MiB", 2**29), ("2TB", 2e12)],
)
def test_sizes_are_read_as_people_write_them(text: str, count: float) -> None:
    assert ByteSize().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "0GiB", "60 GiBs"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"such as 60GiB|write it as 60GiB"):
        ByteSize().convert(text, None, None)


def test_plan_as_a_process_prints_json_alone(folder: Path) -> None:
    found = run(folder, "plan", "users_step:step", "--world-size", "2", "--hardware", "cpu", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["world_size"] == 2
    assert "made by a function" in found.stderr


# --- calibrate and doctor ---------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How calibration was asked for; it answers with a preset at once."""
    asked: list[dict[str, Any]] = []

    def answer(*_: Any, **how: Any) -> Hardware:
        asked.append(how)
        return Hardware.preset("cpu")

    monkeypatch.setattr("zgraph.analysis.calibration.calibrate", answer)
    return asked


def test_calibrate_prints_what_can_be_read_again(folder: Path, measured: list[dict[str, Any]]) -> None:
    found = typed("calibrate", "--json")
    assert Hardware.from_json(found.stdout) == Hardware.preset("cpu")
    assert "205 GB/s" in typed("calibrate", "--refresh", "--cache", "kept").stdout
    assert measured == [{"cache": None, "refresh": False}, {"cache": Path("kept"), "refresh": True}]


def test_the_table_of_a_process_alone_does_not_claim_links() -> None:
    rows = dict(table_of(Hardware.preset("cpu")).rows)
    assert rows["link between hosts"] == "1.25 GB/s, 100.0 us a message; not measured"
    assert rows["matrix products in float32"] == "5.02 TFLOP/s"


def test_the_doctor_finds_this_machine_ready(folder: Path, measured: list[dict[str, Any]]) -> None:
    found = typed("doctor", "--json")
    document = json.loads(found.stdout)
    checks = {(check["group"], check["name"]): check for check in document["checks"]}
    assert (found.exit_code, document["ready"]) == (0, True), checks
    assert checks["versions", "torch"]["found"] == torch.__version__
    assert checks["versions", "transformers"]["found"] == version("transformers")
    assert "gloo" in checks["ranks", "backends"]["found"]
    assert Hardware.from_json(json.dumps(document["hardware"])) == Hardware.preset("cpu")
    shown = typed("doctor").stdout
    assert "ready to train" in shown and "not ready" not in shown
    asked = len(measured)
    assert json.loads(typed("doctor", "--no-rates", "--json").stdout)["hardware"] is None
    assert len(measured) == asked
    assert sorted(path.name for path in folder.iterdir()) == ["broken_step.py", "users_step.py"]


@pytest.mark.parametrize(
    ("broken", "name", "advice"),
    [
        ("zgraph.torch_compat.inductor.cpp_compiler", "C++", "apt-get install g++"),
        ("zgraph.cli.machine_checks.is_writable", "Inductor", "TORCHINDUCTOR_CACHE_DIR"),
        ("torch.distributed.is_backend_available", "backends", "built with gloo"),
    ],
)
def test_the_doctor_says_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str, name: str, advice: str
) -> None:
    if name == "backends" and torch.cuda.is_available():
        advice = "built with nccl"
    monkeypatch.setattr(broken, lambda *_: None)
    found = typed("doctor", "--no-rates", "--json")
    document = json.loads(found.stdout)
    (check,) = [check for check in document["checks"] if check["status"] == "missing"]
    assert (found.exit_code, document["ready"], check["name"]) == (1, False, name)
    assert advice in check["advice"]
    shown = typed("doctor", "--no-rates")
    assert shown.exit_code == 1
    assert "not ready to train" in shown.stdout and advice in shown.stdout


def test_the_doctor_works_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['zgraph', 'doctor', '--json']\n"
        "from zgraph.__main__ import run; run()"
    )
    found = run(tmp_path, "-c", program, python=())
    document = json.loads(found.stdout)
    (missing,) = [check for check in document["checks"] if check["status"] == "missing"]
    assert (found.returncode, missing["name"], missing["advice"]) == (1, "torch", "pip install 'torch>=2.11,<2.16'")


def test_rich_reads_no_markup_in_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables([Table("[bold]title[/bold]", ("[red]a",), (("[link=x]b[/link]",), ("missing",)))], missing="red")
    shown = capsys.readouterr().out
    for text in ("[bold]title[/bold]", "[red]a", "[link=x]b[/link]", "missing"):
        assert text in shown


# Slow: two ranks that measure for seconds; the doctor's document has all of the other's.
@pytest.mark.parametrize("command", ["doctor", *long("calibrate")])
def test_under_torchrun_rank_0_prints_what_the_ranks_measured(command: str, tmp_path: Path) -> None:
    words = [*torchrun.TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "zgraph", command, "--json"]
    environment = {**os.environ, **torchrun.environment("lo"), "HOME": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # one document, and not gloo's messages
    hardware = document if command == "calibrate" else document["hardware"]
    found = Hardware.from_json(json.dumps(hardware))
    assert found.name == "calibrated cpu, 2 ranks" and found.links == {1: found.intra_host}
    if command == "doctor":
        checks = {check["name"]: check for check in document["checks"]}
        assert checks["group"]["found"] == "2 ranks on gloo"
        assert checks["interface of gloo"]["found"] == "lo 127.0.0.1, by GLOO_SOCKET_IFNAME"


# Slow: calibration alone measures for seconds, with which the doctor begins.
@pytest.mark.parametrize("command", ["doctor", *long("calibrate")])
def test_alone_as_a_process(command: str, tmp_path: Path) -> None:
    found = run(tmp_path, command)
    assert found.returncode == 0, found.stderr
    assert "calibrated cpu, 1 rank" in found.stdout and "not measured" in found.stdout
    assert len([*(tmp_path / ".cache" / "zgraph").iterdir()]) == 1
