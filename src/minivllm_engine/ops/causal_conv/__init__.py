"""Causal depthwise convolution with carried history."""
