"""What lies on the device: the caches and a step's input."""
