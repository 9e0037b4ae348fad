"""Everything that zgraph shows: dumps, the report of what was compiled, predictions and measurements."""
