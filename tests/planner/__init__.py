"""Plans for clusters that do not exist."""
