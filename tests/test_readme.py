"""Every Python block of the README runs as printed, with default options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.readme import BLOCKS, SETTINGS, run_block


def settings_of(block: str) -> list[str]:
    return [one.on for one in SETTINGS if block.startswith(one.begins)]


def test_every_block_has_one_setting() -> None:
    assert [len(settings_of(block)) for block in BLOCKS] == [1] * len(SETTINGS)


# Slow: the default lowering compiles C++.
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[block.partition("\n")[0][:40].strip() for block in BLOCKS])
def test_a_block_runs_as_printed(two_ranks: Ranks, tmp_path: Path, number: int) -> None:
    if settings_of(BLOCKS[number]) == ["ranks"]:
        two_ranks.run(run_block, number, str(tmp_path))
    else:
        run_block(number, str(tmp_path))
