"""Pipeline stages of sharded modules, and backwards in two halves."""
