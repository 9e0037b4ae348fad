"""Compression methods and their arithmetic: what travels instead of a tensor, and how its error is kept."""
