"""Parts of gpu.py: two ranks that share the GPU, over gloo and over NCCL."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import adamw
from gpu_setting import Dropping, Row, Setting, differing, local
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from zgraph.passes import LoCo, presets

TIMEOUT = timedelta(seconds=45)  # of a collective; a rank that waits for a dead one says so within the part's limit


def gloo_two(setting: Setting) -> Iterator[Row]:
    """Six steps at once, and from a checkpoint of the third the last three again: the same bits."""
    for lowering in setting.lowerings:
        said = _ranks(setting, "resume", "gloo", lowering, f"resume-{lowering}")
        yield {"what": f"two gloo ranks, {lowering}: resumed with dropout and LoCo", "said": said, "ok": not said}


def nccl_two(setting: Setting) -> Iterator[Row]:
    """Every stage, planned buckets and coalesced gathers over NCCL, whose sums of two terms are gloo's bits.

    NCCL refuses two ranks on one GPU of a host: here each takes itself for another host, and they talk over sockets.
    """
    backend = "nccl" if setting.on_cuda else "gloo"
    for name, of in (("gloo", "gloo"), ("found", backend)):
        said = _ranks(setting, "train", of, "fx", name)
        if said:
            yield {"what": f"two {of} ranks", "said": said, "ok": False}
            return
    expected, found = (torch.load(setting.scratch / name / "trained.pt") for name in ("gloo", "found"))
    for name in expected:
        wrong = differing(found[name], expected[name])
        what = f"two {backend} ranks, {name}: the bits of gloo"
        yield {"what": what, "tensors": len(found[name]), "that differ": wrong, "ok": not wrong}


def _ranks(setting: Setting, what: str, backend: str, lowering: str, name: str) -> str | None:
    """Run a function of this file on two ranks; None, or the end of what they have said."""
    work = setting.scratch / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    flags = [what, backend, lowering, setting.device.type, "16" if setting.dry else "1024", str(work)]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), *flags],
            env=os.environ | {"NCCL_HOSTID": f"host{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    for text in said:
        print(text, flush=True)
    return None if not any(rank.returncode for rank in ranks) else f"{said[0][-900:]} ... {said[1][-900:]}"


# --- in a rank --------------------------------------------------------------------------------------------------------


def rank_main(rank: int, what: str, backend: str, lowering: str, device: str, width: str, work: str) -> None:
    store = dist.FileStore(f"{work}/store", 2)
    options: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if backend == "nccl" else {}
    if device == "cuda" and backend == "gloo":
        backend = "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=TIMEOUT, **options)
    run = {"resume": _resume, "train": _train}[what]
    run(rank, lowering, device, int(width), Path(work))
    dist.destroy_process_group()


def _batch(rank: int, step: int, width: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, width, generator=generator).to(device)


def _built(device: str, width: int, lowering: str, passes: zgraph.PassList, **of_shard: Any) -> tuple[Any, Any, Any]:
    """The sharded model, what is called, and the optimizer."""
    torch.compiler.reset()
    torch.manual_seed(3)
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("dp",))
    model = zgraph.shard(Dropping(width).to(device), mesh, **of_shard)
    options: dict[str, Any] = {"lowering": lowering, "passes": passes}
    return model, torch.compile(model, backend="zgraph", options=options), adamw(model)


def _resume(rank: int, lowering: str, device: str, width: int, work: Path) -> None:
    """Train, save and go on.

    Raises:
        AssertionError: what was resumed is not what went on.
    """

    def built() -> tuple[Any, Any, Any]:
        return _built(device, width, lowering, zgraph.PassList(presets.default(compression=LoCo())), zero_stage=2)

    def train(model: Any, called: Any, optimizer: Any, steps: range) -> list[Tensor]:
        losses: list[Tensor] = []
        for step in steps:
            loss = called(_batch(rank, step, width, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(local(loss))
        return [*losses, *(local(parameter) for parameter in model.parameters())]

    model, called, optimizer = built()
    torch.manual_seed(100 + rank)
    train(model, called, optimizer, range(3))
    zgraph.save_checkpoint(work / "checkpoints", model, optimizer, step=3)
    expected = train(model, called, optimizer, range(3, 6))
    model, called, optimizer = built()
    latest = zgraph.latest_checkpoint(work / "checkpoints")
    assert latest is not None
    assert zgraph.load_checkpoint(latest, model, optimizer).step == 3
    found = train(model, called, optimizer, range(3, 6))
    assert not differing(found, expected), f"{differing(found, expected)} of {len(found)} losses and parameters differ"


def _train(rank: int, lowering: str, device: str, width: int, work: Path) -> None:
    """Three steps of each setting; what rank 0 has is saved."""
    settings: dict[str, dict[str, Any]] = {
        **{f"stage {stage}": {"zero_stage": stage} for stage in (0, 1, 2, 3)},
        "stage 3, bf16": {"zero_stage": 3, "param_dtype": torch.bfloat16},
        "stage 3, planned": {"zero_stage": 3, "passes": presets.planned},
        "stage 3, accumulated": {"zero_stage": 3, "windows": 2},
    }
    trained = {name: _steps(rank, lowering, device, width, **chosen) for name, chosen in settings.items()}
    if rank == 0:
        torch.save(trained, work / "trained.pt")


def _steps(
    rank: int, lowering: str, device: str, width: int, passes: Any = presets.default, windows: int = 1, **of_shard: Any
) -> list[Tensor]:
    target = zgraph.Target(hardware=zgraph.Hardware.preset("h100")) if passes is presets.planned else None
    model, called, optimizer = _built(device, width, lowering, zgraph.PassList(passes(), target=target), **of_shard)
    torch.manual_seed(100 + rank)
    losses: list[Tensor] = []
    for step in range(3):
        for window in range(windows - 1):
            with zgraph.no_sync(model):
                called(_batch(rank, 50 + step + window, width, device)).backward()
        loss = called(_batch(rank, step, width, device))
        loss.backward()
        zgraph.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(local(loss))
    return [*losses, *(local(parameter) for parameter in model.parameters())]


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), *sys.argv[2:])
