"""Orders and lifetimes."""
