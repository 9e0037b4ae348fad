"""Device meshes: which axis zgraph shards over, which one tensor parallelism splits over, what machines they span."""
