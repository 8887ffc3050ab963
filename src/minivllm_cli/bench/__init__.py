"""The command `bench`: how fast a model runs here, and whether two measured runs differ."""
