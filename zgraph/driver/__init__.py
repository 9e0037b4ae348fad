"""The torch.compile backend: its options, and the compilation of one frame from captured graph to program."""
