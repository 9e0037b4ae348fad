"""Copies between device, host and disk that run concurrently with compute."""
