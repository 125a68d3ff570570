"""Layer normalization, alone or with the residual sum before it."""
