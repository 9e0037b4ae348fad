"""What torch.compile calls: options, and the compile of one frame from trace to program."""
