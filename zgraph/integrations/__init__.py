"""Adapters for training front ends. Each imports its own front end; `import zgraph` imports none of them."""
