"""Places of memory: the host, disks, and one of the user's."""
