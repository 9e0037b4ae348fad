"""Properties of users' models: buffers, hooks, shared memory, loops over sharded tensors, writes to weights."""
