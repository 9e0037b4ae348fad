"""The pass interface, and the code that runs passes: pass list, verification, partition, agreement, budget."""
