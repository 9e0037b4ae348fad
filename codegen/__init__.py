"""Lowering: from the final graph to a callable."""
