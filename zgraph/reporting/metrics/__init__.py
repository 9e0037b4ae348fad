"""What each step took, and where that is written while a model trains."""
