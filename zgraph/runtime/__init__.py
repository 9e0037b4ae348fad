"""State that outlives a call of a compiled graph."""
