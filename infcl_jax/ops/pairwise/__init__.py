"""Sums over all pairs of a sharded batch.

One engine, and a folder for each loss on it: `lse`, `sigmoid` and `distillation`. This package imports JAX, jaxtyping
and `ops.common` only.
"""
