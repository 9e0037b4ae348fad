"""Device meshes: the axes that zgraph shards over, the tensor-parallel axis, and checks that ranks agree."""
