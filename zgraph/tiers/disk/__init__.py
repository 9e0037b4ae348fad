"""Tensors in files: mapped for all code, read and written in the background by graphs."""
