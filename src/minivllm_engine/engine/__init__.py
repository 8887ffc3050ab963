"""From a prompt to its outputs: preparation, input, loop, output."""
