"""Checkpoints that are either complete or absent, even if a save is interrupted.

A checkpoint is a directory in the format of torch.distributed.checkpoint (DCP). It is written under a hidden name,
renamed when complete, and checked before it is loaded, by the file `zgraph.json`: sizes and CRC-32 of all other files.
Any number of ranks can load it. Parameters and optimizer state have the same names as in torch's `get_state_dict`
("model.<name>", "optimizer.state.<name>.<key>"), so torch's own tools can read them, too.
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
