"""Memory of parameters, gradients and optimizer state, from shapes."""

import functools
from typing import Any, NamedTuple

import jax
import optax

from infcl_jax.models import CLIP
from infcl_jax.ops.pairwise_lse.base import accumulation_dtype
from infcl_jax.planner.activations import parameter_shapes, tree_bytes
from infcl_jax.training.sharding import bytes_per_device
from infcl_jax.training.state import trained


class StateBytes(NamedTuple):
    """Bytes of each.

    Attributes:
      parameters: all of them.
      wide: their gradients, in at least fp32.
      part: one device's part of the parameters.
      updates: its part of those that are trained.
      optimizer: its part of the optimizer state.
      trained: gradients of all that are trained, in at least fp32.
    """

    parameters: int
    wide: int
    part: int
    updates: int
    optimizer: int
    trained: int

    def gradients(self, on_device: bool) -> int:
        """Sums and copies during a step; see `MemoryPlan`."""
        if not on_device:
            return self.parameters + 2 * self.wide
        return self.trained if self.part == self.parameters else self.trained + self.parameters


@functools.lru_cache(maxsize=32)
def state_bytes(
    model: CLIP,
    optimizer: optax.GradientTransformation,
    devices: int,
    parameter_sharding: str,
    frozen: tuple[str, ...],
) -> StateBytes:
    """Of a state as `infcl_jax.training.create_state` makes it."""

    def wide(tree: Any) -> int:
        return tree_bytes(jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, accumulation_dtype(p.dtype)), tree))

    params = parameter_shapes(model)
    updated = trained(params, frozen)
    state = jax.eval_shape(optimizer.init, updated)
    part, updates, moments = (bytes_per_device(tree, devices, parameter_sharding) for tree in (params, updated, state))
    return StateBytes(tree_bytes(params), wide(params), part, updates, moments, wide(updated))
