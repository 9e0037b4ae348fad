"""The backend's name and options, and recompiles."""
