"""What a model takes on a device, and what fits."""
