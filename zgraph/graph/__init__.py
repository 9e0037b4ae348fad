"""Reading and editing FX graphs: metadata, predicates, what collectives send, text."""
