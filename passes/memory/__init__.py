"""Passes that move what does not fit on the device to other memory, and back."""
