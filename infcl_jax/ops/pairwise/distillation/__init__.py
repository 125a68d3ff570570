"""Sums over all pairs for a contrastive loss with distillation."""
