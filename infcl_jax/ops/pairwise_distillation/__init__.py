"""Sums over all pairs of a student and its teacher, for a contrastive loss with distillation.

Strategies, main loops, windows and operands are those of `pairwise_lse`. This folder imports JAX, jaxtyping and
`pairwise_lse` only.
"""
