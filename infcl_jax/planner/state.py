"""Memory of parameters, gradients and optimizer state, from shapes."""

import functools
from typing import Any, NamedTuple

import jax
import optax

from infcl_jax.models import CLIP, TextPair
from infcl_jax.ops.pairwise_lse.base import accumulation_dtype
from infcl_jax.planner.activations import parameter_shapes, tree_bytes
from infcl_jax.training.ema import initial_ema
from infcl_jax.training.frozen import partition
from infcl_jax.training.sharding import bytes_per_device


class StateBytes(NamedTuple):
    """Bytes of parameters, gradients and optimizer state.

    Shards are those of one device; without "fsdp" a shard is everything.

    Attributes:
      parameters: all parameters.
      trained: trained parameters.
      parameter_shard: shard of the parameters.
      updates: shard of the updates, which have the shapes and dtypes of the trained parameters.
      optimizer: shard of the optimizer state.
      ema: shard of the fp32 moving averages of the trained parameters.
      trained_gradients: gradients of the trained parameters, in at least fp32.
    """

    parameters: int
    trained: int
    parameter_shard: int
    updates: int
    optimizer: int
    ema: int
    trained_gradients: int

    def gradients(self, on_device: bool) -> int:
        """Accumulated gradients and copies of the parameters, see `MemoryPlan`.

        Args:
          on_device: whether the batch is in device memory.
        """
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

    def gradient_bytes(tree: Any) -> int:
        return tree_bytes(jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, accumulation_dtype(p.dtype)), tree))

    params = parameter_shapes(model)
    trained, _ = partition(params, frozen)
    opt_state, averages = jax.eval_shape(optimizer.init, trained), jax.eval_shape(initial_ema, trained)
    return StateBytes(
        parameters=tree_bytes(params),
        trained=tree_bytes(trained),
        parameter_shard=bytes_per_device(params, devices, parameter_sharding),
        updates=bytes_per_device(trained, devices, parameter_sharding),
        optimizer=bytes_per_device(opt_state, devices, parameter_sharding),
        ema=bytes_per_device(averages, devices, parameter_sharding),
        trained_gradients=gradient_bytes(trained),
    )
