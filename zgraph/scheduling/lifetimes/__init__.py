"""Values kept from forward to backward: models of a training step, and the search for the fastest within a limit."""
