"""A compression of your own: each element of a gradient travels as its sign, one bit, on two ranks of this machine."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

import zgraph
from zgraph import PassList, passes


@dataclass(frozen=True, kw_only=True)
class Signs(passes.TensorMethod):
    name: ClassVar[str] = "signs"  # by which graphs and checkpoints know it
    keep: float = 1.0  # share of what was not sent that is added to the next gradient

    def sections(self, numel: int) -> tuple[int, ...]:
        return -(-numel // 8), 4  # bytes that stand for a chunk of a gradient: its signs, and one fp32 scale

    def state(self, numel: int, chunks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"error": ((chunks, numel), torch.float32)}  # zeros at first; checkpoints save and restore it

    def quantize(self, grad: Tensor, state: dict[str, Tensor], draw: passes.RngKey, rank: int) -> Sequence[Tensor]:
        wanted = grad.float() + self.keep * state["error"]  # [chunks, numel], a chunk for each rank
        scale = wanted.abs().mean(1, keepdim=True)
        state["error"].copy_(wanted - torch.where(wanted > 0, scale, -scale))
        bits = nn.functional.pad(wanted > 0, (0, -grad.shape[1] % 8)).unflatten(1, (-1, 8))
        return (bits << torch.arange(8)).sum(2).to(torch.uint8), scale.view(torch.uint8)

    def dequantize_sum(self, sections: Sequence[Tensor], numel: int, draw: passes.RngKey) -> Tensor:
        signs, scale = sections  # [ranks, bytes] each: what all ranks have sent of this one's chunk
        bits = (signs.unsqueeze(2) >> torch.arange(8) & 1).flatten(1)[:, :numel]
        return ((2 * bits - 1) * scale.contiguous().view(torch.float32)).sum(0)


def train(compression: passes.TensorMethod | None) -> float:
    torch.manual_seed(0)
    teacher = torch.randn(128, 128) / 8
    model = zgraph.shard(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)))
    options: dict[str, Any] = {"passes": PassList(passes.presets.default(compression=compression)), "lowering": "fx"}
    compiled = torch.compile(model, backend="zgraph", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    loss = torch.zeros(())
    for step in range(100):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = (compiled(x) - torch.tanh(x @ teacher)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}/ranks", rank=rank, world_size=2)
    for name, compression in {"32 bits": None, "1 bit": Signs(), "1 bit, forgetful": Signs(keep=0.0)}.items():
        loss = train(compression)
        if rank == 0:
            print(f"{name:>16}: loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(main, (folder,), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
