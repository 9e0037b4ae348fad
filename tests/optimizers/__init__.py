"""Clipping, steps on shards, replicas, rounded moments."""
