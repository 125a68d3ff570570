"""Benchmarks of kernels and training steps, and comparisons of training runs."""
