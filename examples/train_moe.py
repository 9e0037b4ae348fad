"""Train a mixture of experts on scikit-learn's digits, with the experts spread over the ranks.

    torchrun --nproc-per-node 2 examples/train_moe.py                # CPU with gloo; 4 processes hold each expert twice
    torchrun --nproc-per-node 2 examples/train_moe.py --balance 0    # what becomes of experts that nobody balances
    torchrun --nproc-per-node 2 examples/train_moe.py --quick        # a short check

Each image is cut into 16 patches, the tokens. In every layer a token goes to the expert that its router likes best, on
whichever rank that lies, and comes back; what comes after an expert's capacity is full is dropped, and passes the layer
by. A loss keeps the experts' loads even. The 1797 digits come with scikit-learn: nothing is downloaded. The defaults
take less than a minute on two CPU cores. The lines that spread the experts are in `main`, under "zgraph".
"""

import argparse
import math
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zgraph

SIDE, PATCH, DIGITS = 8, 2, 10
TOKENS, PIXELS = (SIDE // PATCH) ** 2, PATCH**2  # of an image, of a patch
HELD_OUT_EVERY = 5  # images
EXPERT_RANKS = 2  # ranks among which the experts are divided
LOG_EVERY = 20  # steps


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--batch", type=int, default=32, help="images per rank and step")
    add("--layers", type=int, default=2, help="attention and a mixture each")
    add("--width", type=int, default=32, help="channels of the residual path")
    add("--experts", type=int, default=8, help=f"in each layer; a multiple of {EXPERT_RANKS}")
    add("--capacity", type=float, default=1.25, help="room of an expert, as a multiple of an even share of the tokens")
    add("--balance", type=float, default=0.02, help="weight of the loss that evens the experts' loads")
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), default=3, help="of all parameters")
    add("--lr", type=float, default=1e-2, help="learning rate")
    add("--seed", type=int, default=0, help="of the initial weights and the batches")
    add("--lowering", default="fx", help="inductor computes faster, and compiles for a minute before the first step")
    add("--no-compile", dest="compile", action="store_false", help="run eagerly, without any pass")
    add("--quick", action="store_true", help="a run of some seconds: smaller defaults")
    if parser.parse_args().quick:
        parser.set_defaults(steps=60, layers=1)
    options = parser.parse_args()
    for name in ("steps", "batch", "layers", "width", "experts", "capacity"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} is {getattr(options, name)}; it must be above 0")
    if options.experts % EXPERT_RANKS:
        parser.error(f"--experts {options.experts} must be a multiple of {EXPERT_RANKS}")
    return options


# Model.


class Experts(nn.Module):
    """A feed-forward layer for each expert; each rank of an `ep` axis has some, and gets their tokens of all ranks."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / math.sqrt(2 * width))
        self.group: dist.ProcessGroup | None = None

    def split(self, axis: DeviceMesh) -> None:
        """Keep this rank's experts."""
        for name, weight in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(weight.detach(), axis, [Shard(0)])))
        self.group = axis.get_group()

    def forward(self, x: Tensor) -> Tensor:
        """[experts, room, width] of this rank's tokens -> likewise, computed where each expert lies."""
        up, down = (one.to_local() if isinstance(one, DTensor) else one for one in (self.up, self.down))
        own, room = len(up), x.shape[1]
        x = self.exchange(x).unflatten(0, (-1, own)).transpose(0, 1).flatten(1, 2)  # [own, ranks x room, width]
        x = torch.bmm(F.gelu(torch.bmm(x, up)), down)
        return self.exchange(x.unflatten(1, (-1, room)).transpose(0, 1).flatten(0, 1))

    def exchange(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x
        splits = [len(x) // self.group.size()] * self.group.size()
        return all_to_all_single_autograd(x.contiguous(), splits, splits, self.group)


class Mixture(nn.Module):
    """Sends each token to one expert, as Switch Transformers do (Fedus et al. 2021, arXiv 2101.03961)."""

    def __init__(self, experts: int, width: int, capacity: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)
        self.capacity = capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, width] -> the same; the loss that balances loads (section 2.2); how many tokens each expert got."""
        experts = self.router.out_features
        room = math.ceil(self.capacity * len(x) / experts)
        chances = self.router(x).softmax(-1)
        best = F.one_hot(chances.argmax(-1), experts)
        place = (best.cumsum(0) * best).sum(-1) - 1  # of each token among those of its expert
        slot = best[:, :, None] * (place[:, None, None] == torch.arange(room))  # no place for what comes later
        slot = slot.to(x.dtype)  # [tokens, experts, room]
        made = self.experts(torch.einsum("ter,tw->erw", slot, x))
        mixed = chances.amax(-1, keepdim=True) * torch.einsum("ter,erw->tw", slot, made)
        balance = experts * (best.float().mean(0) * chances.mean(0)).sum()  # 1 where loads are even
        return mixed, balance, best.sum(0)


class Layer(nn.Module):
    """Attention between the patches of an image, then a mixture, each on a residual path."""

    def __init__(self, experts: int, width: int, capacity: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mixture = Mixture(experts, width, capacity)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        mixed, balance, loads = self.mixture(self.norms[1](x).flatten(0, 1))
        return x + mixed.view_as(x), balance, loads


class Classifier(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.patches = nn.Linear(PIXELS, options.width)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, options.width))
        self.layers = nn.ModuleList(
            Layer(options.experts, options.width, options.capacity) for _ in range(options.layers)
        )
        self.head = nn.Linear(options.width, DIGITS)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, TOKENS, PIXELS] -> [N, DIGITS]; loss of balance; [layers, experts] tokens that went to each."""
        x = self.patches(images) + self.positions
        balances: list[Tensor] = []
        loads: list[Tensor] = []
        for layer in self.layers:
            x, balance, load = layer(x)
            balances.append(balance)
            loads.append(load)
        return self.head(F.layer_norm(x, x.shape[-1:]).mean(1)), torch.stack(balances).mean(), torch.stack(loads)


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, then those held out."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    rows = SIDE // PATCH
    images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
    images = images.view(-1, rows, PATCH, rows, PATCH).transpose(2, 3).reshape(-1, TOKENS, PIXELS)
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


# Training.


def figures(loss: Tensor, right: Tensor, loads: Tensor, options: argparse.Namespace) -> str:
    """Loss and accuracy of all ranks, what share of the tokens each expert got, and what share was dropped.

    Args:
        loss, right: [] of this rank's images.
        loads: [layers, experts] tokens of this rank that went to each expert; an expert has room for each rank's.
    """
    tokens = loads.sum()
    room = math.ceil(options.capacity * TOKENS * options.batch / options.experts)
    dropped = (loads - room).clamp(min=0).sum() / tokens
    seen = torch.cat([torch.stack([loss, right, dropped]), loads.sum(0) / tokens]) / dist.get_world_size()
    dist.all_reduce(seen)
    mean, accuracy, lost, *shares = seen.tolist()
    shown = " ".join(f"{share:3.0%}" for share in shares)
    return f"loss {mean:.3f}  accuracy {accuracy:.0%}  tokens per expert {shown}  dropped {lost:.1%}"


def main() -> int:
    options = parse_options()
    started = time.perf_counter()
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) % EXPERT_RANKS:
        sys.exit(f"experts on {EXPERT_RANKS} ranks need torchrun --nproc-per-node {EXPERT_RANKS}, or a multiple of it")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels, held_out, held_out_labels = read_digits()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    # zgraph: experts are sharded over the ranks that hold the same ones, everything else over all ranks.
    mesh = init_device_mesh("cpu", (world // EXPERT_RANKS, EXPERT_RANKS), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(options.seed)
    model = Classifier(options)
    for part in model.modules():
        if isinstance(part, Experts):
            part.split(mesh["ep"])
            zgraph.shard(part, mesh["dp"], zero_stage=options.zero_stage, reduction=mesh.size())
    zgraph.shard(model, mesh, zero_stage=options.zero_stage)
    run: Any = model
    if options.compile:
        run = torch.compile(model, backend="zgraph", options={"lowering": options.lowering})
    # From here on it is a plain loop.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01, fused=True)
    draws = torch.Generator().manual_seed(options.seed + 1 + rank)  # other images on each rank

    own = options.experts // EXPERT_RANKS
    say(f"{options.experts} experts in each of {options.layers} layer(s), {own} on each of {EXPERT_RANKS} ranks")
    for step in range(1, options.steps + 1):
        chosen = torch.randint(len(images), (options.batch,), generator=draws)
        logits, balance, loads = run(images[chosen])
        loss = F.cross_entropy(logits, labels[chosen])
        (loss + options.balance * balance).backward()
        zgraph.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % LOG_EVERY == 0 or step == options.steps:
            right = (logits.argmax(-1) == labels[chosen]).float().mean()
            say(f"step {step:>4}  {figures(loss.detach(), right, loads, options)}")

    with torch.no_grad():
        found = model(held_out)[0].argmax(-1)
    accuracy = (found == held_out_labels).float().mean().item()
    say(
        f"{accuracy:.0%} of the digits held out are seen as what they are, {time.perf_counter() - started:.0f} s in all"
    )
    dist.barrier()  # torchrun stops all ranks when the first one ends
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
