"""Processes, meshes and transfers, for training loops of one's own."""

from infcl_jax.runtime.distributed import (
    data_mesh,
    flat_mesh,
    initialize,
    is_lead,
    replicate,
    shard_batch,
    to_host,
    training_mesh,
    union,
)

__all__ = [
    "data_mesh",
    "flat_mesh",
    "initialize",
    "is_lead",
    "replicate",
    "shard_batch",
    "to_host",
    "training_mesh",
    "union",
]
