"""The command `zgraph`."""
