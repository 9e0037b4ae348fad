"""Costs, memory and links."""
