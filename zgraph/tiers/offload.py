"""`zgraph.Offload`: options to store parameters and optimizer state on the host or on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from torch import optim

from zgraph.errors import check_bytes, check_choice, check_patterns
from zgraph.tiers.tier import HOST, NAMES, Disk, Tier

Place = Literal["host", "disk"] | Tier
Bits = Literal[8, 4]


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where parameter shards and their optimizers' state are stored, for `zgraph.shard(offload=...)`.

    Attributes:
        params: storage of parameters: "host", "disk", a `zgraph.Tier` of your own, or None for the device.
        optimizer: storage of optimizer state with one value per element, such as moments; choices as for `params`.
        path: folder for tensors on disk, created if its parent exists. Each rank writes one file there, which is
            deleted when the process ends.
        host_budget_bytes: limit of bytes that a rank may keep on the host; a step that would exceed it is refused
            before it runs. None: no limit.
        update: where a `zgraph.training_step` updates parameters whose optimizer state is on the host: "host", or
            "device", which copies parameters and state to the device and back. None: fused updates run on the host, or
            under `presets.planned` where the step is fastest; unfused updates run on the device if it is a GPU. A GPU
            and its host round updates differently.
        param_bits: 8 or 4: for inference, store and send weights as codes (integers of so many bits, with a scale for
            each group), and decode them on the device where they are read. Lossy. Applies to floating-point parameters
            of two or more dims and 4096 or more elements. None: parameters are stored as they are.
        full_precision: shell patterns of the names of parameters to store uncoded, such as ("*.wte.weight",).

    Raises:
        ValueError: an option, or a combination of options, is not supported.

    Sources: Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840; for offloaded weights that are read layer by layer,
    Aminabadi et al. 2022, "DeepSpeed Inference", arXiv 2207.00032, section 6.
    """

    params: Place | None = None
    optimizer: Place | None = None
    path: str | os.PathLike[str] | None = None
    host_budget_bytes: int | None = None
    update: Literal["host", "device"] | None = None
    param_bits: Bits | None = None
    full_precision: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("params", "optimizer"):
            tier = getattr(self, name)
            if isinstance(tier, type) and issubclass(tier, Tier):
                raise ValueError(
                    f"zgraph.Offload: {name}={tier.__name__} is a class; write {name}={tier.__name__}(), an instance."
                )
            if not (tier is None or isinstance(tier, Tier) or (isinstance(tier, str) and tier in NAMES)):
                raise ValueError(f'zgraph.Offload: {name}={tier!r} is unknown; write "host", "disk" or None.')
            if isinstance(tier, Tier) and None in (tier.to_device, tier.from_device):
                raise ValueError(
                    f"zgraph.Offload: {name}={tier!r} lacks a lane for its copies; give {type(tier).__name__} both: "
                    f'to_device = from_device = zgraph.tiers.lanes.Lane("{tier}").'
                )
        if self.params is None and self.optimizer is None:
            raise ValueError(
                'zgraph.Offload: neither params nor optimizer is offloaded; write optimizer="host", for example, or '
                "leave offload out."
            )
        if "disk" in (self.params, self.optimizer) and (self.path is None or not os.fspath(self.path)):
            named = "params" if self.params == "disk" else "optimizer"
            lacking = "without a path" if self.path is None else "with an empty path"
            raise ValueError(
                f'zgraph.Offload: {named}="disk" {lacking}; write path="/local/folder", on a disk of this machine.'
            )
        if "disk" not in (self.params, self.optimizer) and self.path is not None:
            raise ValueError(
                f'zgraph.Offload: path={str(self.path)!r}, but nothing is stored on disk; write optimizer="disk", or '
                "leave path out."
            )
        if self.host_budget_bytes is not None:
            check_bytes("zgraph.Offload", ", or leave it out", host_budget_bytes=self.host_budget_bytes)
        self._check_update()
        self._check_bits()

    @property
    def params_tier(self) -> Tier | None:
        """Tier in which parameters are stored; None for the device."""
        return self._tier(self.params)

    @property
    def optimizer_tier(self) -> Tier | None:
        """Tier in which optimizer state is stored; None for the device."""
        return self._tier(self.optimizer)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers in use, each once; the host is always the last.

        The host must be last: on a GPU its store claims every CPU tensor that no earlier store holds.
        """
        used = [tier for tier in (self.params_tier, self.optimizer_tier) if tier is not None]
        return (*dict.fromkeys(tier for tier in used if tier != HOST), HOST)

    def _tier(self, place: Place | None) -> Tier | None:
        if place == "disk":
            return Disk(folder=os.fspath(self.path or ""))
        return HOST if place == "host" else place

    def _check_update(self) -> None:
        if self.update is None:
            return
        check_choice("zgraph.Offload", ("host", "device", None), update=self.update)
        tier = self.optimizer_tier
        if tier != HOST:
            where = "the device" if tier is None else f"{tier}, and comes to the device for each update"
            raise ValueError(
                f"zgraph.Offload: update={self.update!r}, but the optimizer's state is stored on {where}; write "
                'optimizer="host", or leave update out.'
            )

    def check_updates(self, optimizer: optim.Optimizer) -> None:
        """Check that an optimizer's updates can run on the host if the option `update` is "host".

        Raises:
            ValueError: the optimizer is not fused: its updates are many small calls.
        """
        if self.update == "host" and not all(group.get("fused") for group in optimizer.param_groups):
            name = type(optimizer).__name__
            raise ValueError(
                f'zgraph.Offload: update="host", but {name} is not fused: its updates are many small calls, which run '
                f"on the GPU; write torch.optim.{name}(..., fused=True), if it has that, or leave update out."
            )

    def _check_bits(self) -> None:
        check_patterns("zgraph.Offload", full_precision=self.full_precision)
        bits = self.param_bits
        if bits is None:
            if self.full_precision:
                raise ValueError(
                    f"zgraph.Offload: full_precision={self.full_precision}, but no parameter is stored as codes; write "
                    "param_bits=8, or leave full_precision out."
                )
            return
        if bits not in get_args(Bits):
            raise ValueError(f"zgraph.Offload: param_bits={bits!r} is not available; write 8, 4 or None.")
        if self.params is None:
            raise ValueError(
                f'zgraph.Offload: param_bits={bits}, but parameters stay on the device; write params="host", or '
                "leave param_bits out."
            )
        if self.optimizer is not None:
            raise ValueError(
                f"zgraph.Offload: param_bits={bits} and optimizer={self.optimizer!r}: codes are for inference, and no "
                "optimizer can step them; leave one of the two out."
            )
