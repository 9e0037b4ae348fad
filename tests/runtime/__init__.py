"""Exchanges between ranks, and state between steps."""
