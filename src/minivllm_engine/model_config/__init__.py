"""What the model's own files say of its shape."""
