"""The terminal: streams, progress, signals, logging."""
