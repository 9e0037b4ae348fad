"""Offloading: options, memory for parameters and optimizer state between uses, and weights stored as codes."""
