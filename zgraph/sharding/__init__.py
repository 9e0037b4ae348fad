"""`zgraph.shard` and sharded models: units, state dicts, accumulation windows, materialization."""
