"""Loops as people write them: right, or refused by an error that names the line to write."""
