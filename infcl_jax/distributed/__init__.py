"""Processes, meshes and transfers, for training loops of one's own."""

from infcl_jax.runtime.distributed import initialize as initialize
from infcl_jax.runtime.mesh import data_mesh as data_mesh
from infcl_jax.runtime.mesh import flat_mesh as flat_mesh
from infcl_jax.runtime.mesh import replicate as replicate
from infcl_jax.runtime.mesh import shard_batch as shard_batch
from infcl_jax.runtime.mesh import to_host as to_host
from infcl_jax.runtime.mesh import training_mesh as training_mesh
from infcl_jax.runtime.processes import is_lead as is_lead
from infcl_jax.runtime.processes import union as union
