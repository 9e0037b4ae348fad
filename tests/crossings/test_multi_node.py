"""torchrun over two hosts, a broken run restarted, an example resumed: each ends as the plain run does, bit for bit."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.ranks import Ranks, RanksPool
from tests.support.runs import elastic
from tests.support.torchrun import LIMIT_S, ROOT, TORCHRUN, environment, running, to_file

SCRIPT = str(ROOT / "tests" / "support" / "runs" / "elastic.py")
EXAMPLE = str(ROOT / "examples" / "train_gpt.py")
# Every part of the example once: training, evaluation, a sample, each compiled.
SMALL = shlex.split("--steps 12 --layers 1 --width 36 --heads 2 --batch 2 --sequence 32 --eval-every 6")


def netns() -> ModuleType:
    """The benchmarks' network of namespaces, or a skip that says what it lacks here."""
    path = ROOT / "examples" / "benchmarks" / "netns.py"
    spec = importlib.util.spec_from_file_location("zgraph_benchmark_netns", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.require_network_tools()
    except module.NetworkError as error:
        pytest.skip(str(error))
    return module


def result(text: str) -> tuple[Any, ...]:
    """The losses of every evaluation, first and last with all digits, and the sample's text."""
    last = re.search(r"^loss (\S+) -> held-out (\S+) nats per byte", text, re.MULTILINE)
    sample = re.search(r"^--- sample\n(.*)\n--- zgraph$", text, re.MULTILINE | re.DOTALL)
    assert last is not None and sample is not None, text
    return last[1], last[2], sample[1], re.findall(r"held-out loss (\S+)", text)


def run_example(tmp_path: Path, ranks: int, *options: str) -> tuple[Any, ...]:
    output = tmp_path / "alone.txt"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), EXAMPLE, *SMALL, *options]
    with running(command, output) as process:
        assert process.wait(LIMIT_S) == 0, output.read_text(errors="replace")
    return result(output.read_text(errors="replace"))


def test_two_hosts_end_with_the_loss_of_one(pool: RanksPool, tmp_path: Path) -> None:
    """A script that trains eight steps, compiled, on 2 x 2 ranks in two network namespaces, against 4 ranks here."""
    module = netns()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    outputs = [tmp_path / f"host{host}.txt" for host in range(2)]
    with module.ShapedNetwork(hosts=2, rate="none") as network:
        processes = []
        for host, output in enumerate(outputs):
            # Nobody resolves the hosts' names, so neither can find out that the endpoint is itself.
            roles = ["--local-addr", network.address(host), "--rdzv-conf", f"is_host={str(host == 0).lower()}"]
            command = [
                *TORCHRUN,
                *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two-hosts"),
                *(
                    "--rdzv-endpoint",
                    f"{network.address(0)}:29500",
                    *roles,
                    SCRIPT,
                    str(tmp_path / "two"),
                    "-1",
                    "compiled",
                ),
            ]
            processes.append(network.popen(host, to_file(output, command), environment(module.INTERFACE)))
        codes = [process.wait(LIMIT_S) for process in processes]
    texts = [output.read_text(errors="replace") for output in outputs]
    assert codes == [0, 0], "\n".join(texts)
    [found] = re.findall(r"final loss (\S+)", "\n".join(texts))  # only rank 0 writes
    assert pool.of(4).run(elastic.unbroken, tmp_path / "one", True)[0] == found


def run_broken(tmp_path: Path, die_in_step: int) -> str:
    output = tmp_path / "broken.txt"
    checkpoints = tmp_path / "broken"
    checkpoints.mkdir()
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    # Without it torchrun starts the second attempt on the store of the first, where the ranks find addresses of the
    # dead (pytorch/pytorch#135712; 2.13 makes one store for all attempts).
    restarts = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with running([*command, SCRIPT, str(checkpoints), str(die_in_step)], output, restarts) as process:
        assert process.wait(LIMIT_S) == 0, output.read_text(errors="replace")
    return output.read_text(errors="replace")


def test_killed_rank_restarts_and_training_resumes_from_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    broken = run_broken(tmp_path, 4)
    assert re.findall(r"attempt (\d) starts at step (\d)", broken) == [("0", "0"), ("1", "3")], broken
    assert "rank 1 ends itself" in broken
    (tmp_path / "unbroken").mkdir()
    expected = ranks.run(elastic.unbroken, tmp_path / "unbroken", False)[0]
    assert re.findall(r"final loss (\S+)", broken) == [expected]


@pytest.mark.long  # the killed rank resumes, too, and test_kills.py compares every loss
def test_the_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    """From a checkpoint within the run, as after a kill between this one and the last; with errors of compression."""
    checkpoints = tmp_path / "checkpoints"
    options = ["--checkpoint", str(checkpoints), "--checkpoint-every", "5", "--resume", "--width", "64", "--compress"]
    unbroken = run_example(tmp_path, 2, *options)
    shutil.rmtree(checkpoints / "step_00000012")
    assert run_example(tmp_path, 2, *options)[:3] == unbroken[:3]  # the rest are evaluations before it
    said = (tmp_path / "alone.txt").read_text(errors="replace")
    assert "resumed from" in said and re.search(r"x all_to_all_single u8: \d+ parameters", said), said
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000010", "step_00000012"]
