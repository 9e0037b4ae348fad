"""`zgraph.shard` and what follows from it: units, state dicts, accumulation windows, materialization."""
