"""Stages of a pipeline: their windows, and backwards in two parts."""
