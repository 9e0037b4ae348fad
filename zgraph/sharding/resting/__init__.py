"""Where parameters and optimizer states rest between uses: the options, the memory, and weights kept as codes."""
