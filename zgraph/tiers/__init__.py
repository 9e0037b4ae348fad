"""Tiers: kinds of memory (device, host, disk), the tensors stored in each, and copies between them and the device."""
