"""Helper processes that compile islands into Inductor's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from zgraph.codegen.islands.helpers import helpers_for


@pytest.mark.parametrize(
    ("islands", "workers", "ranks", "helpers"),
    [
        (24, 1, 1, 0),
        (24, 2, 1, 1),
        (24, 2, 2, 0),  # the ranks share the work
        (24, 16, 2, 3),
        (7, 16, 1, 0),  # too few for a second process to pay
        (8, 16, 1, 1),
        (0, 16, 1, 0),
        (24, 128, 1024, 0),
    ],
)
def test_helpers_are_for_cores_without_a_rank(islands: int, workers: int, ranks: int, helpers: int) -> None:
    assert helpers_for(islands, workers, ranks) == helpers


SCRIPT = """
    import torch
    from torch import fx
    from zgraph.codegen.islands.helpers import Helpers
    from zgraph.graph import meta
    from zgraph.torch_compat.fake_values import step_mode
    from zgraph.torch_compat.inductor import as_in_a_compile, compile_with_inductor, graphs_from_cache

    torch.set_num_threads(1)
    aten = torch.ops.aten
    mode = step_mode()

    def island(rows):
        graph = fx.Graph()
        x = graph.placeholder("arg0")
        with mode:
            value = torch.empty(rows, 8)
        meta.set_value(x, value)
        y = meta.create(graph, aten.sin.default, (x,), name="value0")
        z = meta.create(graph, aten.mul.Tensor, (y, x), name="value1")
        graph.output((z,))
        return fx.GraphModule({}, graph)

    islands = [island(rows) for rows in (3, 5, 7)]
    helpers = Helpers(islands, 2)
    assert [process.wait(120) for process in helpers.processes] == [0, 0]
    helpers.stop()
    before = graphs_from_cache()
    for gm in islands:
        (x,) = gm.graph.find_nodes(op="placeholder")
        with as_in_a_compile(mode):
            run = compile_with_inductor(gm, [meta.value(x)])
        value = torch.randn(meta.value(x).shape)
        assert torch.allclose(run([value])[0], value.sin() * value)
    print("found", graphs_from_cache() - before)
"""


def test_helpers_leave_what_they_compile_in_the_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "found 3\n"), done.stderr
