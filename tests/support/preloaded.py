"""Loaded once by the fork server that all ranks come from: what the first compile imports, every rank then has."""

from __future__ import annotations

import gc
import os

import torch
import torch._inductor.lowering  # what a backward imports beside what a forward does
from torch import nn

import zgraph.driver.backend  # noqa: F401
from tests.support.compiled import with_fx

torch.set_num_threads(1)  # a process must not fork with a pool of threads
# Ranks compute on the CPU. A process that has looked at a GPU, as a compile does, could not fork.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# A backward is left to the ranks: in CUDA builds of torch the first one starts a thread for each device, those that
# fake tensors make up included, and autograd refuses to run in what is forked afterwards.
with torch.no_grad():
    with_fx(nn.Linear(2, 2))(torch.ones(1, 2))
torch.compiler.reset()
# What is loaded stays: no rank looks through it for cycles, which would copy the memory that all of them share.
gc.collect()
gc.freeze()
# A compile makes hundreds of thousands of objects that live to its end. By default it is searched for cycles every 700.
gc.set_threshold(20_000, 10, 10)
