"""Collectives between ranks: starting them, identifying them, and detecting ranks that run different ones."""
