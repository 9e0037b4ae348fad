"""Compression methods and their arithmetic: the encoding of sent tensors, and the error kept for later."""
