"""Plans on disk: the next run finds the planned graphs of a frame instead of tracing and planning it again."""
