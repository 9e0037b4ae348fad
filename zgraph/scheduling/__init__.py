"""Search for schedules (orders of a graph's nodes), and for tensors to keep, gather again or recompute in backward."""
