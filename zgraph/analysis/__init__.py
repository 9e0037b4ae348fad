"""Models of a graph: storages, live ranges and memory curves, and cost on given hardware."""
