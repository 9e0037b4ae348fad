"""Sites that train with torchft's DiLoCo, as its users write it: a lighthouse, and a manager for each site."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented
from torch.optim import Optimizer

WAIT = timedelta(seconds=30)


def train_with_torchft(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    lr: float,
    momentum: float,
    every: int,
    steps: int,
    step: Callable[[int], float],
) -> list[float]:
    """Train one site in each thread, over gloo on the loopback, in fp32.

    Args:
        models: the model of each site, with equal values.
        optimizers: the inner optimizer of each site.
        lr, momentum: of the outer optimizer.
        every: steps between two rounds.
        steps: number of steps of each site; a multiple of `every`.
        step: given the number of a site, steps it and returns its loss.

    Returns:
        The mean loss of the sites, of each step.
    """
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    logging.getLogger("torchft").setLevel(logging.WARNING)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=len(models), join_timeout_ms=100)

    def train(site: int) -> list[float]:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        manager = _manager_of(models[site], optimizers[site], lighthouse.address(), store.port, site, len(models))
        outer = torch.optim.SGD(models[site].parameters(), lr=lr, momentum=momentum, nesterov=True)
        try:
            with DiLoCo(manager, [models[site]], optimizers[site], outer, sync_every=every):
                return [step(site) for _ in range(steps)]
        finally:
            manager.shutdown()

    try:
        with ThreadPoolExecutor(len(models)) as pool:
            losses = [*pool.map(train, range(len(models)))]
    finally:
        lighthouse.shutdown()
    return torch.tensor(losses).mean(0).tolist()


def _manager_of(model: nn.Module, optimizer: Optimizer, address: str, store_port: int, site: int, sites: int) -> Any:
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return Manager(
        pg=ProcessGroupGloo(timeout=WAIT),
        min_replica_size=sites,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=save,
        replica_id=f"site{site}",
        store_addr="localhost",
        store_port=store_port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        timeout=WAIT,
        quorum_timeout=WAIT,
        init_sync=False,  # sites begin with equal values
    )
