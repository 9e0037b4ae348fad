"""Checkpoints that are complete or absent: written under a hidden name, renamed when complete, checked before loading.

A checkpoint is a directory written by torch.distributed.checkpoint, with a file `zgraph.json` that lists size and
CRC-32 of every other file. Any number of ranks can load it. Parameters and optimizer state have the names of torch's
own `get_state_dict` ("model.<name>", "optimizer.state.<name>.<key>"), so torch's tools can read it too.
"""

from zgraph.checkpoint.directory import latest_checkpoint
from zgraph.checkpoint.load import Checkpoint, load_checkpoint
from zgraph.checkpoint.runtime_state import runtime_state
from zgraph.checkpoint.safe_reader import SafePlanner, SafeReader
from zgraph.checkpoint.save import save_checkpoint

__all__ = [
    "Checkpoint",
    "SafePlanner",
    "SafeReader",
    "latest_checkpoint",
    "load_checkpoint",
    "runtime_state",
    "save_checkpoint",
]
