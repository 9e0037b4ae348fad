"""Islands (runs of compute): found in a final graph, and compiled one by one."""
