"""Who runs, and how far in a step."""
