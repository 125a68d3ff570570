"""Device code: one folder for each operation with kernels."""
