"""Steps, clipping and loss scaling on local shards."""
