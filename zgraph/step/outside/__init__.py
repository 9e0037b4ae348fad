"""Values that a captured step reads besides its arguments: variables, their tensors, and other Python values."""
