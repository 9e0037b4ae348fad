"""Checkpoints that cannot be trusted or do not fit: nothing is executed, nothing is half-loaded."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zgraph
from tests.support import models
from tests.support.checkpoints import Noisy, difference, make, snapshot
from tests.support.ranks import Ranks

# --- nothing is executed --------------------------------------------------------------------------------------------


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def poisoned(original: bytes, path: Path, kind: str) -> bytes:
    if kind == "replaced":
        return pickle.dumps(Malicious(path))
    metadata = pickle.loads(original)
    if kind == "inside":
        metadata.planner_data = Malicious(path)
    elif kind == "class":  # sets an attribute of a class that it may name
        build = b"cposix\nsystem\n"
        return (
            b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x08\x00\x00\x00__init__"
            + build
            + b"s\x86b."
        )
    elif kind == "outside":
        first = next(iter(metadata.storage_data.values()))
        first.relative_path = "../expected.pt"
    return pickle.dumps(metadata)


@pytest.mark.parametrize("kind", ["replaced", "inside", "class", "outside"])
def test_a_malicious_metadata_file_is_refused_and_not_executed(saved: Path, tmp_path: Path, kind: str) -> None:
    touched = tmp_path / "touched"
    copy = tmp_path / "copy"
    shutil.copytree(saved / "dcp", copy)
    text = poisoned((copy / ".metadata").read_bytes(), touched, kind)
    (copy / ".metadata").write_bytes(text)
    if kind in ("replaced", "inside"):
        pickle.loads(text)
        assert touched.exists()  # torch's own reader would have
        touched.unlink()
    with pytest.raises(zgraph.CheckpointError, match=r"is damaged|names (pathlib|posix)\.\w+"):
        zgraph.SafeReader(copy).read_metadata()
    assert not touched.exists()


def load_entry(folder: str, touched: str) -> dict[str, Any]:
    state: dict[str, Any] = {"entry": None}
    reader = zgraph.SafeReader(folder)
    try:
        dcp.load(state, storage_reader=reader, planner=zgraph.SafePlanner())
    except BaseException as error:
        return {"text": str(error), "touched": Path(touched).exists()}
    return {"text": "", "touched": Path(touched).exists()}


def save_entry(folder: str, touched: str) -> None:
    dcp.save({"entry": Malicious(Path(touched))}, checkpoint_id=folder)


def test_a_malicious_entry_is_refused_and_not_executed(ranks: Ranks, tmp_path: Path) -> None:
    folder, touched = str(tmp_path / "entry"), str(tmp_path / "touched")
    ranks.run(save_entry, folder, touched)
    for result in ranks.run(load_entry, folder, touched):
        assert "Unsupported global" in result["text"] and not result["touched"]


# --- bad checkpoints ------------------------------------------------------------------------------------------------


def load_bad(folder: str, other_model: str, strange: str | None) -> dict[str, Any]:
    """What loading raises, and what it has changed. `strange` is the folder that rank 1 sees instead."""
    model, optimizer = make(seed=1)
    if other_model == "names":
        model = zgraph.shard(models.Uneven())
    elif other_model == "shapes":
        torch.manual_seed(0)
        plain = Noisy()
        plain.unread = nn.Linear(3, 2)
        model = zgraph.shard(plain)
    elif other_model == "dtypes":
        plain = Noisy()
        plain.unread.double()
        model = zgraph.shard(plain)
    if other_model in ("names", "shapes", "dtypes") or other_model == "groups":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    elif other_model == "fewer":
        optimizer = torch.optim.AdamW([model.down.weight], lr=0.5)
    elif other_model == "strange":
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5)
    before, noise = snapshot(model, optimizer), torch.get_rng_state()
    seen = strange if strange is not None and dist.get_rank() == 1 else folder
    try:
        zgraph.load_checkpoint(seen, model, optimizer)
    except zgraph.CheckpointError as error:
        unchanged = difference(snapshot(model, optimizer), before) == [] and torch.equal(torch.get_rng_state(), noise)
        return {"text": str(error), "unchanged": unchanged}
    return {"text": "", "unchanged": False}


OTHER_MODELS = [
    ("names", r"of another model. Missing key\(s\): gain, .*Unexpected key\(s\): up.weight"),
    ("shapes", r"unread.weight is \[1, 3\] torch.float32 in the checkpoint and \[2, 3\] torch.float32 in the model"),
    ("dtypes", r"unread.weight is \[1, 3\] torch.float32 in the checkpoint and \[1, 3\] torch.float64 in the model"),
    ("groups", r"group 0: 3 parameters from up.weight to unread.weight in the checkpoint, 9 parameters from shift to"),
    ("fewer", r"Optimizer state for parameters that this optimizer does not step: "),
    ("strange", r"group 0 of the optimizer holds 1 tensors that are not parameters of the model"),
]


@pytest.mark.parametrize(("other_model", "text"), OTHER_MODELS, ids=[name for name, _ in OTHER_MODELS])
def test_a_checkpoint_of_another_model_changes_nothing(ranks: Ranks, saved: Path, other_model: str, text: str) -> None:
    for result in ranks.run(load_bad, str(saved / "own/step_00000003"), other_model, None):
        assert result["unchanged"], result["text"]
        assert re.search(text, result["text"]), result["text"]


def spoil(folder: Path, how: str) -> None:
    data, page = folder / "__1_0.distcp", folder / "zgraph.json"
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "missing file":
        data.unlink()
    elif how == "missing metadata":
        (folder / ".metadata").unlink()
    elif how == "truncated metadata":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:200])
    elif how == "no page":
        page.unlink()
    elif how == "broken page":
        page.write_text(page.read_text()[:50])
    elif how == "empty page":
        page.write_text(json.dumps({"format": "zgraph checkpoint", "version": 1}))
    elif how == "version":
        page.write_text(page.read_text().replace('"version": 1', '"version": 99'))
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "absent":
        shutil.rmtree(folder)


SPOILT = [
    ("truncated", "bytes, and"),
    ("flipped", "another checksum"),
    ("missing file", "__1_0.distcp is missing"),
    ("missing metadata", ".metadata is missing"),
    ("truncated metadata", ".metadata is damaged"),
    ("no page", "zgraph.json is missing"),
    ("broken page", "zgraph.json is damaged"),
    ("empty page", "zgraph.json is damaged"),
    ("version", "version 99, and this zgraph reads 'zgraph checkpoint' version 1"),
    ("empty", "is not a complete checkpoint"),
    ("absent", "there is no checkpoint"),
]


@pytest.mark.parametrize("sees", ["all", "one"])
@pytest.mark.parametrize(("how", "text"), SPOILT, ids=[how for how, _ in SPOILT])
def test_damaged_checkpoint_is_refused_everywhere_and_changes_nothing(
    ranks: Ranks, saved: Path, tmp_path: Path, how: str, text: str, sees: str
) -> None:
    good, bad = saved / "own/step_00000003", tmp_path / "step_00000003"
    shutil.copytree(good, bad)
    spoil(bad, how)
    arguments = (str(bad), "", None) if sees == "all" else (str(good), "", str(bad))
    for result in ranks.run(load_bad, *arguments):
        # Each rank checks its part of the files: what only one sees may be what the other one checks.
        if sees == "all" or result["text"]:
            assert text in result["text"] and result["unchanged"]
