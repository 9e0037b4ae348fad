"""Runtime of compiled graphs, and state that outlives a call: groups, collectives, parameter state, random numbers."""
