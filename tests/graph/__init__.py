"""What nodes are and send."""
