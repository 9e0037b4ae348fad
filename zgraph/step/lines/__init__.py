"""Handle the user's calls while a step is traced: pass traced tensors, and refuse unsupported operations."""
