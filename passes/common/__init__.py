"""Graph rewrites and cost decisions shared by several passes."""
