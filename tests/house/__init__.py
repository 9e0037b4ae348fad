"""Rules of the repository: rooms, docs, packaging, examples, versions."""
