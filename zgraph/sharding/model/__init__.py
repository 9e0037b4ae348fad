"""Properties of users' models: buffers, hooks, shared memory, writes to weights."""
