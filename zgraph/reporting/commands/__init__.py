"""The commands of `zgraph` on the command line that need no planner; `zgraph.__main__` puts them together."""
