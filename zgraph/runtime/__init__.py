"""What runs beneath compiled graphs and outlives their calls: groups, collectives, parameter state, random numbers."""
