"""Searches over schedules and lifetimes: what runs when, what is saved for backward, and what is recomputed there."""
