"""Logits to token ids, where nothing is left to chance."""
