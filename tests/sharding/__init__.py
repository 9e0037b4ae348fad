"""Sharded models: units, windows, dtypes, meshes, stages."""
