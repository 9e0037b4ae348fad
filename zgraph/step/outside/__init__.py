"""What a captured step reads from outside of its arguments: variables, their tensors, and other values of Python."""
