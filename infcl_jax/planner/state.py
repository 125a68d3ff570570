"""Memory of parameters, gradients and optimizer state, from shapes."""

import functools
from typing import Any, NamedTuple

import jax
import optax

from infcl_jax.models import CLIP
from infcl_jax.ops.pairwise_lse.base import accumulation_dtype
from infcl_jax.planner.activations import parameter_shapes, tree_bytes
from infcl_jax.training.sharding import bytes_per_device
from infcl_jax.training.state import without_frozen


class StateBytes(NamedTuple):
    """Bytes of parameters, gradients and optimizer state.

    Attributes:
      parameters: all parameters.
      all_gradients: gradients of all parameters, in at least fp32.
      parameter_shard: one device's shard of the parameters.
      updates: one device's shard of the trained parameters.
      optimizer: one device's shard of the optimizer state.
      trained_gradients: gradients of the trained parameters, in at least fp32.
    """

    parameters: int
    all_gradients: int
    parameter_shard: int
    updates: int
    optimizer: int
    trained_gradients: int

    def gradients(self, on_device: bool) -> int:
        """Gradient sums and parameter copies during a step, see `MemoryPlan`."""
        if not on_device:
            return self.parameters + 2 * self.all_gradients
        if self.parameter_shard == self.parameters:
            return self.trained_gradients
        return self.trained_gradients + self.parameters


@functools.lru_cache(maxsize=32)
def state_bytes(
    model: CLIP,
    optimizer: optax.GradientTransformation,
    devices: int,
    parameter_sharding: str,
    frozen: tuple[str, ...],
) -> StateBytes:
    """Measure the state that `infcl_jax.training.create_state` creates."""

    def gradient_bytes(tree: Any) -> int:
        return tree_bytes(jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, accumulation_dtype(p.dtype)), tree))

    params = parameter_shapes(model)
    updated = without_frozen(params, frozen)
    state = jax.eval_shape(optimizer.init, updated)
    shard, updates, moments = (bytes_per_device(tree, devices, parameter_sharding) for tree in (params, updated, state))
    return StateBytes(tree_bytes(params), gradient_bytes(params), shard, updates, moments, gradient_bytes(updated))
