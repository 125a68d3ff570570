"""One training step: encode, global loss through the ring, update."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from infcl_jax.losses import clip_loss, siglip_loss
from infcl_jax.models import CLIPOutput
from infcl_jax.pairwise import IMPLEMENTATIONS
from infcl_jax.pairwise.checks import check_choice, check_implementation
from infcl_jax.training.state import TrainState

Metrics = dict[str, Any]
LossFn = Callable[[CLIPOutput], jax.Array]
TrainStep = Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, Metrics]]

LOSSES = ("clip", "siglip")


def make_loss(name: str, mesh: Mesh, implementation: str | None = None) -> LossFn:
    """The loss of a run as a function of the model's output over the global batch.

    Args:
      name: "clip" or "siglip" (which needs a model with a logit bias).
      mesh: devices over which the batch is sharded.
      implementation: see `infcl_jax.pairwise_lse`.

    Raises:
      ValueError: unknown name or implementation; when called, a model without the bias that "siglip" needs.
    """
    check_choice("loss", name, LOSSES)
    check_implementation(implementation, IMPLEMENTATIONS)

    def loss(output: CLIPOutput) -> jax.Array:
        image, text, scale, bias = output
        if name == "clip":
            return clip_loss(image, text, scale, mesh=mesh, implementation=implementation)
        if bias is None:
            raise ValueError("the siglip loss needs a model with a logit bias; set model_overrides init_logit_bias=-10")
        return siglip_loss(image, text, scale, bias, mesh=mesh, implementation=implementation)

    return loss


def make_train_step(loss_fn: LossFn, seed: int) -> TrainStep:
    """The jitted step `(state, {"image", "text"}) -> (state, metrics)`; the state given is consumed.

    Dropout and patch dropout draw from `seed` and the step, so a resumed run repeats them. Metrics are scalars on the
    device: `loss`, `logit_scale` (both before the update), `grad_norm`; and under `finite`, whether each stage of the
    step held only finite numbers, in order of computation.

    Args:
      loss_fn: from `make_loss`.
      seed: of the dropout keys.
    """

    def step(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def loss_of(params: Any) -> tuple[jax.Array, CLIPOutput]:
            variables = {"params": params}
            output = state.apply_fn(variables, batch["image"], batch["text"], train=True, rngs={"dropout": key})
            return loss_fn(output), output

        (loss, output), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        norms = {name: optax.tree.norm(grad) for name, grad in grads.items()}
        stages = {
            "image features": output.image,
            "text features": output.text,
            "the loss": loss,
            **{f"the gradient of {name}": norm for name, norm in norms.items()},
        }
        # Ordered, because jit sorts the keys of a plain dict.
        finite = OrderedDict((stage, jnp.isfinite(value).all()) for stage, value in stages.items())
        metrics = {
            "loss": loss,
            "logit_scale": output.logit_scale,
            "grad_norm": optax.tree.norm(norms),
            "finite": finite,
        }
        return state.apply_gradients(grads=grads), metrics

    return jax.jit(step, donate_argnums=0)


def check_finite(step: int, metrics: Metrics) -> None:
    """Stops a run whose numbers are no longer numbers.

    Args:
      step: the step of the metrics.
      metrics: of `make_train_step`, on the host.

    Raises:
      FloatingPointError: something was not finite; the message names the first such stage of the step.
    """
    bad = [stage for stage, finite in metrics["finite"].items() if not finite]
    if bad:
        raise FloatingPointError(
            f"step {step}: {bad[0]} became NaN or infinite (loss {float(metrics['loss']):.4g}, logit scale "
            f"{float(metrics['logit_scale']):.4g}, gradient norm {float(metrics['grad_norm']):.4g}); resume from an "
            "earlier checkpoint with a lower learning rate, a longer warm-up or a smaller clip_norm"
        )
