"""Tiers: places of memory other than the device, what is kept there, and copies between them and the device."""
