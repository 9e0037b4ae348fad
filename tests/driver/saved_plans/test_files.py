"""Files of saved plans: what cannot be trusted is compiled again, and replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.saved_plans import equal, grads_of, plans_in, runs
from zgraph.driver.saved_plans import folder as folder_module
from zgraph.driver.saved_plans.folder import PlanFolder
from zgraph.graph.pickled import dumps, loads
from zgraph.torch_compat.fake_values import fake_mode


class Two(nn.Module):
    def __init__(self, view: bool) -> None:
        super().__init__()
        self.first, self.last, self.view = nn.Linear(4, 6), nn.Linear(6, 2), view

    def forward(self, x: Tensor) -> Any:
        result = self.last(self.first(x).relu())
        return (result, result.flatten()) if self.view else result


def once(view: bool = False) -> tuple[dict[str, Tensor], zgraph.Report]:
    model = zgraph.shard(Two(view))
    compiled = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
    result = compiled(torch.ones(3, 4))
    (result[0] if view else result).square().sum().backward()
    return grads_of(model), zgraph.summary(compiled)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def let_others_write(file: Path) -> None:
    file.chmod(0o666)


def belong_to_another_user(file: Path) -> None:
    os.chown(file, 12345, -1)


def hold_something_else(file: Path) -> None:
    PlanFolder(file.parent).write(file.name, dumps({"saved": print}))


def hold_the_plan_of_another_frame(file: Path) -> None:
    content = PlanFolder(file.parent).read(file.name)
    assert content is not None
    PlanFolder(file.parent).write("another", content)
    os.replace(file.parent / "another", file)


def be_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def lack_an_output(file: Path) -> None:
    """So that AOTAutograd raises its own error while it traces the stand-in."""
    folder = PlanFolder(file.parent)
    content = folder.read(file.name)
    assert content is not None
    entry = loads(content, fake_mode())
    folder.write(file.name, dumps(replace(entry, outputs=())))


def change_the_findings(file: Path) -> None:
    """As if AOTAutograd of another build found something else on the same frame."""
    folder = PlanFolder(file.parent)
    content = folder.read(file.name)
    assert content is not None
    entry = loads(content, fake_mode())
    folder.write(file.name, dumps(replace(entry, findings=replace(entry.findings, text="other"))))


def after(damage: Callable[[Path], None], folder: Path) -> tuple[bool, list[int]]:
    """Whether three runs computed the same bits, one before and two after the damage; how many plans each found."""
    folder /= str(dist.get_rank())
    first = runs(folder, once, 1)
    (file,) = folder.iterdir()
    damage(file)
    found = first + runs(folder, once)
    return all(equal(found[0][0], other) for other, _, _ in found), [plans for _, _, plans in found]


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip_a_bit,
        empty,
        let_others_write,
        belong_to_another_user,
        hold_something_else,
        hold_the_plan_of_another_frame,
        be_a_pipe,
        lack_an_output,
        change_the_findings,
    ],
)
@worlds(2)
def test_damaged_files_are_compiled_again_and_replaced(ranks: Ranks, damage: Any, tmp_path: Path) -> None:
    if damage is belong_to_another_user and os.getuid() != 0:
        pytest.skip("only root gives files away")
    assert ranks.run(after, damage, tmp_path) == [(True, [0, 0, 1])] * 2


OF_A_VIEW = "views or objects that it returns, or gradients that it writes"


def reason_for_a_view(folder: Path) -> tuple[list[str], int]:
    with plans_in(folder):
        _, report = once(view=True)
    assert (
        "not saved for the next run: frame 0/0 (views or objects that it returns, or gradients that it writes)"
        in str(report)
    )
    return list(report.unsaved.values()), len([*folder.iterdir()]) if folder.exists() else 0


@worlds(2)
def test_summary_says_why_a_plan_is_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(reason_for_a_view, tmp_path / "none") == [([OF_A_VIEW], 0)] * 2


def written_pairs(folder: Path) -> list[tuple[bool, int, list[str]]]:
    """For inputs that share memory and are written to: were the results right, plans found, and why none was saved."""
    linear = zgraph.shard(nn.Linear(4, 4))
    found: list[tuple[bool, int, list[str]]] = []
    with plans_in(folder / str(dist.get_rank())):
        for places in ((0, 0, 1), (0, 1, 1), (0, 1, 2), (0, 1, 1)):
            torch.compiler.reset()
            report = zgraph.Report()

            def write(x: Tensor, p: Tensor, q: Tensor, r: Tensor) -> Tensor:
                p.add_(1)
                q.mul_(2)
                r.add_(3)
                return linear(x) + (p + q + r).sum()

            results: list[list[Tensor]] = []
            for run in (write, torch.compile(write, backend="zgraph", options={"lowering": "fx", "report": report})):
                bases = [torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 3.0)]
                inputs = [bases[place].view(3) for place in places]
                results.append([run(torch.ones(2, 4), *inputs), *bases])
            same = all(torch.equal(*pair) for pair in zip(*results, strict=True))
            found.append((same, report.cached_plans, list(report.unsaved.values())))
    return found


@worlds(2)
def test_written_inputs_that_share_memory_are_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(written_pairs, tmp_path):
        assert all(same for same, _, _ in found)
        assert [plans for _, plans, _ in found] == [0, 0, 0, 0]
        assert [reasons for _, _, reasons in found if reasons] == [["written inputs that share memory"]] * 3


def reason_where_nothing_can_be_written(folder: Path) -> list[str]:
    file = folder / str(dist.get_rank())
    file.write_text("a file where the folder should be")
    with plans_in(file):
        _, report = once()
    return list(report.unsaved.values())


@worlds(2)
def test_summary_says_that_nothing_can_be_written(ranks: Ranks, tmp_path: Path) -> None:
    for (reason,) in ranks.run(reason_where_nothing_can_be_written, tmp_path):
        assert reason.startswith(str(tmp_path))


def found_by_default(folder: Path) -> tuple[int, int]:
    """The number of plans that a second run finds with torch's caches off, and in Inductor's directory."""
    folder /= str(dist.get_rank())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    off = os.environ.pop("ZGRAPH_CACHE_DIR", None)
    try:
        torch.compiler.reset()
        with torch.compiler.config.patch(force_disable_caches=True):
            once()
        assert not (folder / "zgraph").exists()
        found: list[int] = []
        for _ in range(2):
            torch.compiler.reset()
            found.append(once()[1].cached_plans)
        assert [*(folder / "zgraph").iterdir()]
        return found[0], found[1]
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if off is not None:
            os.environ["ZGRAPH_CACHE_DIR"] = off


@worlds(2)
def test_plans_are_saved_by_default_beside_those_of_inductor(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(found_by_default, tmp_path) == [(0, 1)] * 2


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_LARGEST_BYTES", 250)
    folder = PlanFolder(tmp_path)
    for number in range(4):
        folder.write(f"plan {number}", bytes(60))
        os.utime(tmp_path / f"plan {number}", (number, number))
    folder.write("plan 4", bytes(60))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan 3", "plan 4"]
    assert folder.read("plan 4") == bytes(60)
    assert folder.read("plan 0") is None
