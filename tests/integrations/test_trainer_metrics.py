"""Metrics in the Trainer's logs, of training steps alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer

from tests.support.front_ends import launched
from tests.support.ranks import Ranks
from tests.support.trainers import trainer


def logs(folder: str) -> list[dict[str, Any]]:
    """Logs of four steps of which the second is followed by an evaluation, after one before training."""
    with launched():
        found = trainer(folder, {"zero_stage": 3, "metrics": True}, include_num_input_tokens_seen="all")
        found.evaluate()
        found.train()
        return [entry for entry in found.state.log_history if "loss" in entry]


def test_logs_have_the_values_of_each_step(ranks: Ranks, tmp_path: Path) -> None:
    for first, *later in ranks.run(logs, str(tmp_path)):
        assert first["compile_ms"] > 0  # a model that was evaluated first is compiled, too
        assert [entry["compile_ms"] for entry in later] == [0, 0, 0]  # the evaluation's compile is not of step 3
        assert len({entry["sent_bytes"] for entry in later}) == 1
        for entry in later:
            assert entry["tokens_per_s"] > 0 and entry["exposed_ms"] <= entry["step_ms"]


def test_private_methods_of_the_trainer_are_there() -> None:
    assert callable(Trainer._save_checkpoint)
