"""GPU properties, sharding helpers and the row pipeline shared by kernels."""
