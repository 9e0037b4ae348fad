"""What `report.json` holds, as plain dataclasses, and how texts and memory are taken down for it."""
