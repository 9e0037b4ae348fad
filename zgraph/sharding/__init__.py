"""`zgraph.shard` and the sharded model: units that gather, state dicts, gradient accumulation, initialisation."""
