"""Log-sum-exps over the negatives that a guide keeps, a second model with features of the same pairs."""
