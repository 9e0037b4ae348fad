"""What a pass is, and what runs passes: pipeline, verification, partition, agreement, the budget."""
