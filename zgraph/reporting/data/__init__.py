"""The content of `report.json` as plain dataclasses, and functions that fill in graph texts and memory."""
