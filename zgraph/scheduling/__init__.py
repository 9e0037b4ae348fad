"""Searches over schedules and lifetimes: what runs when, and what is kept or made again."""
