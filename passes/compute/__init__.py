"""Passes that rewrite the model's own computation, rather than its communication or memory."""
