"""The state of a run: parameters, optimizer state and step, on the devices of the mesh."""

from collections.abc import Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training import train_state
from jax.sharding import Mesh

from infcl_jax.checks import check_choice
from infcl_jax.models import TOWERS, clamp_logit_scale
from infcl_jax.training.sharding import PARAMETER_SHARDINGS, shardings


class TrainState(train_state.TrainState):
    """Flax's train state for a CLIP model: `step`, `params`, `opt_state`; static `apply_fn`, `tx` and `frozen`.

    Attributes:
      batch_stats: running statistics of batch normalisation, None for models without.
      samples: what a global contrastive loss remembers (`infcl_jax.SampleState`), None for other losses.
      frozen: towers that are not trained, of `infcl_jax.models.TOWERS`. The optimizer knows nothing of them.
    """

    batch_stats: Any = None
    samples: Any = None
    frozen: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @classmethod
    def create(cls, *, params: Any, frozen: tuple[str, ...] = (), **fields: Any) -> "TrainState":
        """A state at step 0, with optimizer state for what is trained."""
        return super().create(params=trained(params, frozen), frozen=frozen, **fields).replace(params=params)

    @property
    def trained(self) -> dict[str, Any]:
        """The parameters that are trained."""
        return trained(self.params, self.frozen)

    @property
    def variables(self) -> dict[str, Any]:
        """What the model's methods take, outside training."""
        return {"params": self.params} | ({} if self.batch_stats is None else {"batch_stats": self.batch_stats})

    def apply_gradients(self, *, grads: Any, **changes: Any) -> "TrainState":
        """One optimizer step, after which the logit scale is put back into its range (at most 100).

        Args:
          grads: of `trained`.
          **changes: of other fields.
        """
        state = super(TrainState, self.replace(params=self.trained)).apply_gradients(grads=grads, **changes)
        return state.replace(params=clamp_logit_scale({**self.params, **state.params}))


def trained(params: Mapping[str, Any], frozen: Collection[str]) -> dict[str, Any]:
    """The parameters of a CLIP model without those of the frozen towers."""
    left_out = [TOWERS[name] for name in frozen]
    return {name: branch for name, branch in params.items() if name not in left_out}


def create_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    image_size: int,
    context_length: int,
    seed: int,
    mesh: Mesh,
    parameter_sharding: str = "replicated",
    frozen: Collection[str] = (),
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
      frozen: towers that keep their parameters, "image" or "text" (LiT, Zhai et al. 2022): without gradients, optimizer
        moments and weight decay.

    Raises:
      ValueError: another `parameter_sharding`, or no such tower.
    """
    check_choice("parameter_sharding", parameter_sharding, PARAMETER_SHARDINGS)
    for name in frozen:
        check_choice("frozen", name, tuple(TOWERS))

    def init() -> TrainState:
        image = jnp.zeros((1, image_size, image_size, 3), jnp.uint8)
        variables = model.init(jax.random.key(seed), image, jnp.zeros((1, context_length), jnp.int32))
        statistics = variables.get("batch_stats")
        return TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=statistics, frozen=tuple(frozen)
        )

    return jax.jit(init, out_shardings=shardings(jax.eval_shape(init), mesh, parameter_sharding))()


def parameter_count(params: Any) -> int:
    """Number of scalars."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
