"""Features that meet each other."""
