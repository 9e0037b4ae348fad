"""Compression methods for gradients and parameters: encodings, their arithmetic, and error feedback."""
