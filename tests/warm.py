"""Loaded once by the fork server that all ranks come from: what the first compile imports, every rank then has."""

from __future__ import annotations

import torch
from torch import nn

import zgraph  # noqa: F401
from tests.compiled import with_fx

torch.set_num_threads(1)  # a process must not fork with a pool of threads
with_fx(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
torch.compiler.reset()
