"""Names, shapes and places of a checkpoint's tensors, from headers alone."""
