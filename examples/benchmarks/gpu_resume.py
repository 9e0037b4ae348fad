"""Part of gpu.py: two ranks that share the device train, save, and go on bitwise from what they have saved."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_setting import HERE, Row, Setting
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from zgraph.passes import LoCo, presets


class Dropping(nn.Module):
    """Layers with dropout, so that a resumed run needs the random generators as they were."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return x


def run_resume(setting: Setting) -> Iterator[Row]:
    for lowering in setting.lowerings:
        work = setting.out / f"resume_{lowering}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        arguments = [setting.device.type, str(work), lowering, "tiny" if setting.tiny else "full"]
        code = "import sys; from gpu_resume import resume_rank; resume_rank(*sys.argv[1:])"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), *arguments],
                cwd=HERE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=200)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        good = all(rank.returncode == 0 and "bitwise" in text for rank, text in zip(ranks, said, strict=True))
        yield {
            "what": f"two gloo ranks, {lowering}: resumed with dropout and LoCo, losses and parameters bitwise",
            "ok": good,
            "said": None if good else said[0][-1000:] + said[1][-1000:],
        }


def resume_rank(rank: str, device: str, work: str, lowering: str, size: str) -> None:
    """One of two ranks: six steps at once, and from a checkpoint of the third the last three again.

    Raises:
        AssertionError: they differ.
    """
    store = dist.FileStore(f"{work}/store", 2)
    backend = "cpu:gloo,cuda:gloo" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=2)
    width = 160 if size == "tiny" else 1024

    def built() -> tuple[Any, Any, torch.optim.Optimizer]:
        torch.compiler.reset()
        torch.manual_seed(3)
        mesh = init_device_mesh(device, (2,), mesh_dim_names=("dp",))
        model = zgraph.shard(Dropping(width).to(device), mesh, zero_stage=2)
        pipeline = zgraph.Pipeline(presets.default(compression=LoCo()))
        options: dict[str, Any] = {"lowering": lowering, "pipeline": pipeline}
        called = torch.compile(model, backend="zgraph", options=options)
        return model, called, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def train(called: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
        losses: list[Tensor] = []
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + int(rank))
            x = torch.randn(8, width, generator=generator).to(device)
            loss = called(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model, called, optimizer = built()
    torch.manual_seed(100 + int(rank))
    train(called, optimizer, range(3))
    zgraph.save_checkpoint(f"{work}/checkpoints", model, optimizer, step=3)
    expected = train(called, optimizer, range(3, 6))
    shards = [parameter.detach().to_local().clone() for parameter in model.parameters()]
    model, called, optimizer = built()
    latest = zgraph.latest_checkpoint(f"{work}/checkpoints")
    assert latest is not None
    assert zgraph.load_checkpoint(latest, model, optimizer).step == 3
    found = train(called, optimizer, range(3, 6))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), f"losses {found} after resuming, {expected} without"
    for parameter, shard in zip(model.parameters(), shards, strict=True):
        assert torch.equal(parameter.detach().to_local(), shard), "parameters differ after resuming"
    print("bitwise", flush=True)
    dist.destroy_process_group()
