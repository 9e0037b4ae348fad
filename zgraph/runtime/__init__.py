"""What compiled graphs need at run time: process groups, collectives, parameter state and random numbers."""
