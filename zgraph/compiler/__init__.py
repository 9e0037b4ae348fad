"""The pass interface and everything that runs passes: pipeline, verification, partition, agreement, budget."""
