"""Benchmarks, and comparisons of whole runs."""
