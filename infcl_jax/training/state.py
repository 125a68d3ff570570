"""The state of a run: parameters, optimizer state and step, on every device of the mesh."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.models import clamp_logit_scale


class TrainState(train_state.TrainState):
    """Flax's train state for a CLIP model: `step`, `params`, `opt_state`; static `apply_fn` and `tx`.

    Attributes:
      batch_stats: running statistics of batch normalisation, None for models without.
      samples: what a global contrastive loss remembers (`infcl_jax.SampleState`), None for other losses.
    """

    batch_stats: Any = None
    samples: Any = None

    @property
    def variables(self) -> dict[str, Any]:
        """What the model's methods take, outside training."""
        return {"params": self.params} | ({} if self.batch_stats is None else {"batch_stats": self.batch_stats})

    def apply_gradients(self, *, grads: Any, **changes: Any) -> "TrainState":
        """One optimizer step, after which the logit scale is put back into its range (at most 100)."""
        state = super().apply_gradients(grads=grads, **changes)
        return state.replace(params=clamp_logit_scale(state.params))


def create_state(
    model: nn.Module, tx: optax.GradientTransformation, image_size: int, context_length: int, seed: int, mesh: Mesh
) -> TrainState:
    """A fresh state, the same on every device of `mesh`, whatever the number of devices.

    Args:
      model: a `CLIP` module.
      tx: optimizer.
      image_size: pixels of the square images the model takes.
      context_length: tokens of the texts it takes.
      seed: of the initial parameters.
      mesh: devices that hold the state.
    """

    def init() -> TrainState:
        image = jnp.zeros((1, image_size, image_size, 3), jnp.uint8)
        variables = model.init(jax.random.key(seed), image, jnp.zeros((1, context_length), jnp.int32))
        statistics = variables.get("batch_stats")
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=statistics)

    return jax.jit(init, out_shardings=NamedSharding(mesh, PartitionSpec()))()


def parameter_count(params: Any) -> int:
    """Number of trained scalars."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
