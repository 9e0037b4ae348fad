"""Reading and editing FX graphs: node metadata, predicates on nodes, traffic of collectives, and graphs as text."""
