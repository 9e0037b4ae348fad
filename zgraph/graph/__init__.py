"""Reading and editing FX graphs: metadata, predicates, bytes that collectives send, text."""
