"""Sums over all pairs for a contrastive loss with distillation.

Strategies, main loops, windows and operands are those of `pairwise_lse`. This folder imports JAX, jaxtyping and
`pairwise_lse` only.
"""
