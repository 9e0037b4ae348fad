"""Axes of a planned cluster, and pipeline schedules: the order of their actions, their time and memory."""
