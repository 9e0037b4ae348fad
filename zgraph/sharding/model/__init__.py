"""What a user's model brings along: its buffers, hooks and shared memory, and a forward that writes to its weights."""
