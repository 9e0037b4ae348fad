"""Device meshes: the axis that zgraph shards over, the tensor-parallel axis, and the machines they span."""
