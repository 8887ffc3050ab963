"""Weights, one step, its graphs and its samples."""
