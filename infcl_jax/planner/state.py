"""Memory of parameters, gradients, optimizer state and teacher, from shapes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from infcl_jax.models import CLIP, TextPair, variable_shapes
from infcl_jax.ops.pairwise.base import accumulation_dtype
from infcl_jax.planner.activations import encoder_memory, feature_width, parameter_shapes, tree_bytes
from infcl_jax.planner.devices import planned_device
from infcl_jax.planner.loss import loss_workspace
from infcl_jax.training.frozen import partition
from infcl_jax.training.sharding import bytes_per_device
from infcl_jax.training.state import initial_ema


class StateBytes(NamedTuple):
    """Bytes of parameters, gradients and optimizer state; without "fsdp" the shard of a device is everything."""

    parameters: int
    trained: int  # parameters
    parameter_shard: int
    updates: int  # shard with the shapes and dtypes of the trained parameters
    optimizer: int  # shard of its state
    ema: int  # shard of the fp32 moving averages of the trained parameters
    trained_gradients: int  # in at least fp32

    def gradients(self, on_device: bool) -> int:
        """Accumulated gradients and copies of the parameters, with the batch in device memory or not."""
        sharded = self.parameter_shard != self.parameters  # "fsdp" gathers the parameters
        if on_device:
            return self.trained_gradients + (self.parameters if sharded else 0)
        # `HostDriver`: copy of the trained parameters, accumulated gradients, and gradients of the loss's own use.
        return (self.parameters if sharded else self.trained) + 2 * self.trained_gradients


@functools.lru_cache(maxsize=32)
def state_bytes(
    model: CLIP | TextPair,
    optimizer: optax.GradientTransformation,
    devices: int,
    parameter_sharding: str,
    frozen: frozenset[str],
) -> StateBytes:
    """Count the bytes of the state that `infcl_jax.training.create_state` creates."""

    def shard(tree: Any) -> int:
        return bytes_per_device(tree, devices, parameter_sharding)

    params = parameter_shapes(model)
    trained, _ = partition(params, frozen)
    gradients = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, accumulation_dtype(p.dtype)), trained)
    return StateBytes(
        parameters=tree_bytes(params),
        trained=tree_bytes(trained),
        parameter_shard=shard(params),
        updates=shard(trained),
        optimizer=shard(jax.eval_shape(optimizer.init, trained)),
        ema=shard(jax.eval_shape(initial_ema, trained)),
        trained_gradients=tree_bytes(gradients),
    )


class TeacherMemory(NamedTuple):
    """Teacher of a run with distillation or guided negatives, for `Workload`.

    Examples:
      >>> teacher = TeacherMemory(model)
      >>> teacher.persistent(block_rows=64) > TeacherMemory(model, cached=True).persistent(block_rows=64)
      True

    Attributes:
      model: teacher.
      cached: whether batches have its features in place of its parameters in device memory.
    """

    model: CLIP | TextPair
    cached: bool = False

    def persistent(self, block_rows: int, passages: int = 1) -> int:
        """Bytes of the parameters and of the features of a batch with `passages` for each query.

        With the cache, bytes of the features of two batches alone.
        """
        row_bytes = feature_width(self.model) * jnp.dtype(self.model.feature_dtype).itemsize
        features = (1 + passages) * block_rows * row_bytes
        return 2 * features if self.cached else features + tree_bytes(variable_shapes(self.model))

    def forward(self, shard_rows: int) -> int:
        """Peak bytes of the forward pass over a chunk's rows on one device."""
        if self.cached:
            return 0
        with planned_device():
            return max(encoder.forward(shard_rows) for encoder in encoder_memory(self.model))

    def loss_workspace(self, implementation: str, batch_size: int, devices: int) -> int:
        """Bytes that the teacher adds to the workspace of the loss."""
        return loss_workspace(implementation, batch_size, feature_width(self.model), self.model.feature_dtype, devices)
