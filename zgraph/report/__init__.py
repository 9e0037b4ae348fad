"""What zgraph shows: graph text, dumps, and the report of what was compiled."""
