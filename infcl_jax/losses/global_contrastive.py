"""Global contrastive losses: SogCLR, iSogCLR and FastCLIP v0 to v3.

Forward and backward each compute the similarities of all pairs once.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from infcl_jax.checks import check_choice
from infcl_jax.losses.batch import Array, AxisName, check_pairs, checked_scalar, global_sum, over_mesh
from infcl_jax.losses.samples import SampleState, check_index, read_samples, write_samples
from infcl_jax.ops.pairwise_lse import pairwise_lse
from infcl_jax.ops.pairwise_lse.base import varying_over
from infcl_jax.ops.pairwise_lse.checks import check_axis, check_features, checked_mask

# Clipping of per-sample temperature gradients, and the range of per-sample temperatures (FastCLIP's code).
_MAX_TEMPERATURE_GRADIENT = 5.0
_TEMPERATURE_RANGE = (0.01, 1.0)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Settings of one global contrastive loss.

    Attributes:
      temperature: "constant", "learned" (a single one), or "samples" (two learned temperatures per sample).
      scaled: whether the paper multiplies each sample's term by its temperature.
      scaled_in_code: whether the authors' code multiplies each sample's term by its temperature.
      gamma_schedule: schedule of gamma in the papers, "constant" or "cosine" by epoch. The caller applies it.
      regularized: whether the loss contains `rho` times the temperature.
    """

    temperature: str
    scaled: bool
    scaled_in_code: bool
    gamma_schedule: str
    regularized: bool = False


VARIANTS = {
    "sogclr": Variant("constant", True, False, "constant"),
    "isogclr": Variant("samples", True, False, "constant", regularized=True),
    "fastclip_v0": Variant("learned", False, False, "cosine"),
    "fastclip_v1": Variant("constant", True, False, "cosine"),
    "fastclip_v2": Variant("samples", True, False, "cosine", regularized=True),
    "fastclip_v3": Variant("learned", True, True, "cosine", regularized=True),
}


class _Adam(NamedTuple):
    """Adam settings for per-sample temperatures."""

    beta1: float
    beta2: float
    eps: float


_ADAM = _Adam(0.9, 0.999, 1e-8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Static settings of one call."""

    variant: Variant
    published: bool
    eps: float
    rho: float
    temperature_learning_rate: float | None
    temperature_adam: _Adam
    implementation: str | None

    @property
    def factor(self) -> float:
        """Factor k of the loss."""
        return 1.0 if self.published else 0.5

    @property
    def scaled(self) -> bool:
        """True if each term is multiplied by its temperature."""
        return self.variant.scaled if self.published else self.variant.scaled_in_code


def global_contrastive_loss(
    image: Array,
    text: Array,
    index: Array,
    state: SampleState,
    *,
    variant: str,
    gamma: Array | float,
    logit_scale: Array | float | None = None,
    epoch: Array | int | None = None,
    temperature_learning_rate: float | None = None,
    temperature_beta1: float = _ADAM.beta1,
    temperature_beta2: float = _ADAM.beta2,
    temperature_eps: float = _ADAM.eps,
    rho: float = 0.0,
    eps: float = 1e-14,
    mode: str = "published",
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Array | None = None,
    implementation: str | None = None,
    rows_only: bool = False,
) -> tuple[Array, SampleState]:
    """Contrastive loss of each sample against the whole dataset.

    The state holds a moving average u of each sample's mean exponential over its negatives. The global batch size is b,
    `s_ij` is the similarity of image i and text j, and t1, t2 are the temperatures of images and texts (a single one,
    or two per sample):

        g1_i = 1/(b-1) sum_{j != i} exp((s_ij - s_ii) / t1_i)       u1_i <- (1 - gamma) u1_i + gamma g1_i
        g2_i = 1/(b-1) sum_{j != i} exp((s_ji - s_ii) / t2_i)       u2_i <- (1 - gamma) u2_i + gamma g2_i
        loss = k mean_i(c1_i log(eps + u1_i) + c2_i log(eps + u2_i) + rho (t1_i + t2_i))

    An unseen sample takes `u <- g`. The gradient is the papers' estimator, `d log(eps + u) = dg / (eps + u)`. It is not
    the gradient of the scalar, which depends on earlier batches. Value and gradient do not depend on the device count.
    All exponentials stay in log space, so nothing overflows.

    | variant | c | temperature | rho |
    | --- | --- | --- | --- |
    | "sogclr", "fastclip_v1" | t | constant | |
    | "isogclr", "fastclip_v2" | t | per sample, updated here with Adam | yes |
    | "fastclip_v0" | 1 | single, learned through `logit_scale` | |
    | "fastclip_v3" | t | single, learned through `logit_scale` | yes |

    "sogclr" and "fastclip_v1" differ only in the schedule of `gamma`, as do "isogclr" and "fastclip_v2".

    `mode="published"` follows the papers, with k = 1. `mode="reference"` follows the authors' code, with which they
    tuned their settings:

    - k = 1/2, and c = 1 except for "fastclip_v3";
    - the temperature gradient through the pairs is doubled;
    - the temperature gradient of "fastclip_v3" uses u instead of `eps + u`.

    With `gamma = 1`, `eps = 1 / (b - 1)`, k = 1/2 and c = 1 this is `clip_loss - log(b - 1)`.

    Yuan et al., "Provable Stochastic Optimization for Global Contrastive Learning" (SogCLR); Qiu et al., "Not All
    Semantics are Created Equal" (iSogCLR); Wei et al., "FastCLIP", section 4 and Algorithm 1.

    Example:
      >>> state = create_samples(len(dataset), mesh=mesh)
      >>> def loss_fn(image, text, scale, state):
      ...     return global_contrastive_loss(image, text, index, state, variant="fastclip_v3", gamma=0.8, rho=6.5,
      ...                                    logit_scale=scale, mesh=mesh)
      >>> (loss, state), gradients = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1, 2), has_aux=True))(...)

    Args:
      image: `[b, D]` L2-normalized features, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      index: int `[b]`, dataset sample of each row. If a sample occurs twice in the batch, each row's gradient uses its
        own u, and the state stores the u of the last row.
      state: sample state from `create_samples`, with `temperature` for variants with per-sample temperatures.
      variant: one of `VARIANTS`.
      gamma: scalar in [0, 1], inner learning rate. With 0, u of a seen sample never changes. The gradient's factor
        g / (eps + u) is at most 1 / gamma, hence unbounded with 0.
      logit_scale: scalar inverse of the single temperature; None for variants with per-sample temperatures.
      epoch: int, number of completed epochs, for Adam's bias correction; per-sample temperatures only.
      temperature_learning_rate: learning rate of per-sample temperatures; None for other variants.
      temperature_beta1: decay of the first moment of per-sample temperatures, in [0, 1); 0 is used in the first epoch.
        FastCLIP's code uses beta1, beta2 and eps of the parameters' optimizer.
      temperature_beta2: decay of the second moment of per-sample temperatures, in [0, 1); 0 is used in the first epoch.
      temperature_eps: added to the root of the second moment of per-sample temperatures.
      rho: weight of the temperatures in the loss; only for variants with rho in the table.
      eps: added to u.
      mode: "published" or "reference".
      axis_name: mesh axis (or axes) of the batch, see `clip_loss`.
      mesh: mesh over which batch and state are sharded, see `clip_loss`.
      mask: bool `[b]`, False for masked pairs (padding), whose features and index may hold any values.
      implementation: backend, see `pairwise_lse`.
      rows_only: return the batch's new state rows instead of the new state. A step made of several programs passes them
        to `write_samples` in its last program, the only one that may overwrite the state.

    Returns:
      The scalar loss in fp32 (fp64 for fp64 features), and the new state (or rows). The loss is NaN if an index is not
      a sample of the state.

    Raises:
      ValueError: shapes, dtypes or settings do not match, a concrete (not traced) index is out of range, or the batch
        size is not divisible by the device count.
    """
    check_pairs(image, text)
    check_features(image, text)
    check_choice("variant", variant, tuple(VARIANTS))
    check_choice("mode", mode, ("published", "reference"))
    plan = _Plan(
        variant=VARIANTS[variant],
        published=mode == "published",
        eps=float(eps),
        rho=float(rho),
        temperature_learning_rate=None if temperature_learning_rate is None else float(temperature_learning_rate),
        temperature_adam=_Adam(float(temperature_beta1), float(temperature_beta2), float(temperature_eps)),
        implementation=implementation,
    )
    _check_settings(variant, plan, state, logit_scale, epoch)
    # The index check needs the mask as passed: under jit, `checked_mask` turns it into a tracer.
    in_shard_map, concrete_mask = axis_name is not None and mesh is None, mask
    mask = checked_mask("mask", mask, image.shape[0])
    index = _checked_index(index, concrete_mask, None if in_shard_map else state, image.shape[0])
    scalars = tuple(
        None if value is None else checked_scalar(name, value, image)
        for name, value in (("gamma", _checked_gamma(gamma)), ("logit_scale", logit_scale), ("epoch", epoch))
    )
    sharded = (image, text, index, lax.stop_gradient(state), mask)
    loss, rows = over_mesh(_loss, plan, sharded, scalars, axis_name=axis_name, mesh=mesh, sharded_result=(False, True))
    if rows_only:
        return loss, rows
    index = index if mask is None else jnp.where(mask, index, jnp.full_like(index, -1))
    return loss, write_samples(state, index, rows, axis_name=axis_name, mesh=mesh)


def _loss(plan: _Plan, axis_name: AxisName | None, sharded: Any, scalars: Any) -> tuple[Array, SampleState]:
    """Compute the global loss and the new state rows of the local batch."""
    image, text, index, state, mask = sharded
    check_axis(axis_name, image, text)
    gamma, scale, epoch = scalars
    kind = plan.variant.temperature
    primals = varying_over((image, text, scale), axis_name)
    image, text, scale = lax.stop_gradient(primals)
    exists = jnp.ones((len(index), 1), bool) if mask is None else mask[:, None]
    count = global_sum(varying_over(exists.sum().astype(gamma.dtype), axis_name), axis_name)
    rows = read_samples(state, jnp.where(exists[:, 0], index, jnp.zeros_like(index)), axis_name)
    old = jax.tree.map(lambda a: a.astype(gamma.dtype), rows)
    tau = old.temperature if kind == "samples" else jnp.broadcast_to(1 / scale, old.log_u.shape)

    def log_means(image: Array, text: Array, scale: Array) -> Array:
        """Compute log g of images and texts, `[b/n, 2]`."""
        x_scale, y_scale = (scale, scale) if scale.ndim == 0 else (scale[:, 0], scale[:, 1])
        negatives = pairwise_lse(
            image,
            text,
            x_scale,
            y_scale if scale.ndim else None,
            axis_name=axis_name,
            positives="exclude",
            x_mask=mask,
            y_mask=mask,
            implementation=plan.implementation,
        )
        log_sums = negatives.row - x_scale * negatives.positive, negatives.col - y_scale * negatives.positive
        return jnp.stack(log_sums, axis=1) - jnp.log(jnp.maximum(count - 1, 1))

    if kind == "constant":
        log_g, pull = jax.vjp(lambda image, text: log_means(image, text, scale), image, text)
    else:
        log_g, pull = jax.vjp(log_means, image, text, 1 / tau if kind == "samples" else scale)
    log_u = _moving_average(old.log_u, log_g, gamma)
    log_u_eps = jnp.logaddexp(log_u, jnp.full_like(log_u, math.log(plan.eps)))
    pair_weight = plan.factor / count
    weight = pair_weight * tau if plan.scaled else jnp.full_like(tau, 1) * pair_weight
    gradients = pull(jnp.where(exists, weight * jnp.exp(log_g - log_u_eps), jnp.zeros_like(tau)))

    rho = plan.rho if plan.variant.regularized else 0.0
    value = _sum_where(exists, weight * log_u_eps + pair_weight * rho * tau)
    new = SampleState(log_u)
    if kind == "samples":
        d_tau = log_u_eps + plan.rho - gradients[2] / (weight * tau)
        new = _update_temperatures(old, log_u, d_tau, epoch, plan)
        gradients = (*gradients[:2], None)
    elif kind == "learned":
        d_scale = gradients[2] if plan.published else 2 * gradients[2]
        if plan.scaled:  # the loss has the temperature as a factor
            log_factor = log_u_eps if plan.published else log_u
            d_scale = d_scale - pair_weight * _sum_where(exists, tau**2 * (log_factor + rho))
        gradients = (*gradients[:2], d_scale)
    else:
        gradients = (*gradients, jnp.zeros_like(scale))
    return global_sum(_with_gradients(value, primals, gradients), axis_name), new


def _moving_average(log_u: Array, log_g: Array, gamma: Array) -> Array:
    """Compute `log((1 - gamma) u + gamma g)`.

    An unseen sample (u = 0) takes log g.
    """
    moved = jnp.logaddexp(jnp.log1p(-gamma) + log_u, jnp.log(gamma) + log_g)
    return jnp.where(jnp.isneginf(log_u), log_g, moved)


def _update_temperatures(old: SampleState, log_u: Array, d_tau: Array, epoch: Array, plan: _Plan) -> SampleState:
    """Apply Adam to the per-sample temperatures.

    A sample occurs once per epoch, so the bias correction counts epochs. The first epoch ignores the stored moments.
    """
    d_tau = jnp.clip(d_tau, -_MAX_TEMPERATURE_GRADIENT, _MAX_TEMPERATURE_GRADIENT)
    first_epoch, adam = epoch == 0, plan.temperature_adam

    def moment(old: Array, new: Array, beta: float) -> tuple[Array, Array]:
        mean = jnp.where(first_epoch, new, beta * old + (1 - beta) * new)
        correction = -jnp.expm1((epoch + 1) * math.log(beta)) if beta else jnp.ones_like(epoch)
        return mean, jnp.where(first_epoch, mean, mean / correction)

    first, direction = moment(old.first_moment, d_tau, adam.beta1)
    second, square = moment(old.second_moment, d_tau**2, adam.beta2)
    temperature = old.temperature - plan.temperature_learning_rate * direction / (jnp.sqrt(square) + adam.eps)
    return SampleState(log_u, jnp.clip(temperature, *_TEMPERATURE_RANGE), first, second)


@jax.custom_vjp
def _with_gradients(value: Array, primals: Any, gradients: Any) -> Array:
    """Return `value` with custom `gradients` with respect to `primals`."""
    return value


def _forward(value: Array, primals: Any, gradients: Any) -> tuple[Array, Any]:
    return value, gradients


def _backward(gradients: Any, cotangent: Array) -> tuple[None, Any, None]:
    return None, jax.tree.map(lambda g: (cotangent * g.astype(cotangent.dtype)).astype(g.dtype), gradients), None


_with_gradients.defvjp(_forward, _backward)


def _sum_where(exists: Array, values: Array) -> Array:
    return jnp.where(exists, values, jnp.zeros_like(values)).sum()


def _checked_index(index: Array, mask: Array | None, state: SampleState | None, rows: int) -> Array:
    """Check the index and cast it to int32.

    `state` is None inside `shard_map`, where the range of a shard does not bound the global index.
    """
    if index.shape != (rows,) or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(f"expected index to be integers of shape ({rows},), got {index.dtype}{list(index.shape)}")
    if state is not None:
        check_index(index, mask, state)
    return jnp.asarray(index).astype(jnp.int32)


def _checked_gamma(gamma: Array | float) -> Array | float:
    if not isinstance(gamma, jax.Array) and not 0 <= gamma <= 1:
        raise ValueError(f"expected 0 <= gamma <= 1, got {gamma}")
    return gamma


def _check_settings(name: str, plan: _Plan, state: SampleState, logit_scale: Any, epoch: Any) -> None:
    """Raise `ValueError` for missing or unused settings of the variant."""
    if not plan.eps > 0:
        raise ValueError(f"expected eps > 0, got {plan.eps}")
    if plan.rho and not plan.variant.regularized:
        raise ValueError(f"expected no rho for {name}, which has none, got {plan.rho}")
    per_sample, adam = plan.variant.temperature == "samples", plan.temperature_adam
    for setting, beta in (("temperature_beta1", adam.beta1), ("temperature_beta2", adam.beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"expected 0 <= {setting} < 1, got {beta}")
    if not adam.eps > 0:
        raise ValueError(f"expected temperature_eps > 0, got {adam.eps}")
    if adam != _ADAM and not per_sample:
        raise ValueError(f"expected no temperature_beta1, temperature_beta2, temperature_eps for {name}, got {adam}")
    requirements = {
        "logit_scale": (logit_scale, not per_sample),
        "epoch": (epoch, per_sample),
        "temperature_learning_rate": (plan.temperature_learning_rate, per_sample),
        "temperatures in the state": (state.temperature, per_sample),
    }
    for setting, (value, required) in requirements.items():
        if (value is not None) != required:
            no, got = ("", "none") if required else ("no ", "one")
            raise ValueError(f"expected {no}{setting} for {name}, got {got}")
