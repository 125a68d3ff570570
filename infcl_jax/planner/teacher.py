"""Memory of the teacher of a run with distillation."""

from typing import NamedTuple

import jax.numpy as jnp

from infcl_jax.models import CLIP, variable_shapes
from infcl_jax.planner.activations import encoder_memory, feature_width, tree_bytes
from infcl_jax.planner.devices import planned_device
from infcl_jax.planner.loss import loss_workspace


class TeacherMemory(NamedTuple):
    """Teacher of a run, for `Workload`.

    Examples:
      >>> teacher = TeacherMemory(model)
      >>> teacher.persistent(block_rows=64) > TeacherMemory(model, cached=True).persistent(block_rows=64)
      True

    Attributes:
      model: teacher.
      cached: whether batches have its features in place of its parameters in device memory.
    """

    model: CLIP
    cached: bool = False

    @property
    def width(self) -> int:
        """Feature dimension of the teacher."""
        return feature_width(self.model)

    def persistent(self, block_rows: int) -> int:
        """Bytes of the parameters and of a batch's features.

        With the cache, bytes of the features of two batches alone.
        """
        features = 2 * block_rows * self.width * jnp.dtype(self.model.feature_dtype).itemsize
        return 2 * features if self.cached else features + tree_bytes(variable_shapes(self.model))

    def forward(self, shard_rows: int) -> int:
        """Peak bytes of the forward pass over a chunk's rows on one device."""
        if self.cached:
            return 0
        with planned_device():
            return max(encoder.forward(shard_rows) for encoder in encoder_memory(self.model))

    def loss_workspace(self, implementation: str, batch_size: int, devices: int) -> int:
        """Bytes that the teacher adds to the workspace of the loss."""
        dtype = jnp.dtype(self.model.feature_dtype)
        return loss_workspace(implementation, batch_size, self.width, dtype, devices)
