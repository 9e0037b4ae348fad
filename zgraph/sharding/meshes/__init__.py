"""Axes of device meshes: which one zgraph shards over, and which one tensor parallelism splits over."""
