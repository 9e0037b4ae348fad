"""Clusters of several dimensions: their axes, what travels on each, and the schedules of a pipeline on one of them."""
