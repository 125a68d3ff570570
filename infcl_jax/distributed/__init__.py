"""Processes, meshes and transfers, for training loops of one's own."""

from infcl_jax.runtime.distributed import initialize
from infcl_jax.runtime.mesh import data_mesh, flat_mesh, replicate, shard_batch, to_host, training_mesh
from infcl_jax.runtime.processes import is_lead, union

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
