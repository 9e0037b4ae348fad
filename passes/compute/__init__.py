"""Passes that rewrite what the model itself computes; all others are about its communication."""
