"""Rewrites and choices that several passes share."""
