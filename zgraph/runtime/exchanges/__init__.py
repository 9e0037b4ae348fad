"""Exchanges between ranks: starting them, their identity, and a watch that detects mismatched ones."""
