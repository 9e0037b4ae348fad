"""Models of a graph: storages and live ranges, cost on a machine, a simulated step."""
