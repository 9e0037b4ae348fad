"""Placement of a model's offloaded tensors: their tiers, moves around optimizer steps, and the budget of the host."""
