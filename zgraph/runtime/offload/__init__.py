"""Copies between memory spaces that run beside compute: device, host and disk."""
