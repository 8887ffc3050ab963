"""Norms, activations and rotary embedding, each one pass over what it reads."""
