"""The state of a run: parameters, optimizer state and step, on the devices of the mesh."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from jax.sharding import Mesh

from infcl_jax.models import clamp_logit_scale
from infcl_jax.pairwise.checks import check_choice
from infcl_jax.training.sharding import PARAMETER_SHARDINGS, shardings


class TrainState(train_state.TrainState):
    """Flax's train state for a CLIP model: `step`, `params`, `opt_state`; static `apply_fn` and `tx`."""

    def apply_gradients(self, *, grads: Any, **changes: Any) -> "TrainState":
        """One optimizer step, after which the logit scale is put back into its range (at most 100)."""
        state = super().apply_gradients(grads=grads, **changes)
        return state.replace(params=clamp_logit_scale(state.params))


def create_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    image_size: int,
    context_length: int,
    seed: int,
    mesh: Mesh,
    parameter_sharding: str = "replicated",
) -> TrainState:
    """A fresh state, the same numbers whatever the number of devices.

    Args:
      model: a `CLIP` module.
      tx: optimizer.
      image_size: pixels of the square images the model takes.
      context_length: tokens of the texts it takes.
      seed: of the initial parameters.
      mesh: devices that hold the state.
      parameter_sharding: "replicated": all of it on every one. "fsdp": every large array, optimizer moments included,
        is sharded over them, see `infcl_jax.training.sharding`.

    Raises:
      ValueError: another `parameter_sharding`.
    """
    check_choice("parameter_sharding", parameter_sharding, PARAMETER_SHARDINGS)

    def init() -> TrainState:
        image = jnp.zeros((1, image_size, image_size, 3), jnp.uint8)
        params = model.init(jax.random.key(seed), image, jnp.zeros((1, context_length), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return jax.jit(init, out_shardings=shardings(jax.eval_shape(init), mesh, parameter_sharding))()


def parameter_count(params: Any) -> int:
    """Number of trained scalars."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
