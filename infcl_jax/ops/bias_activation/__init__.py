"""Bias and activation function in one pass."""
