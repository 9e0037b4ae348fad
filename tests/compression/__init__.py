"""Compression methods."""
