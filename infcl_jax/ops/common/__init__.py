"""GPU facts, sharding helpers and the row pipeline that the kernels of several operations share."""
