"""The command `convert-weights`."""
