"""Axes of a cluster, and schedules of pipeline parallelism on one of them: order, time and memory."""
