"""The content of `report.json` as plain dataclasses, and how texts and memory are recorded for it."""
