"""Global contrastive losses: SogCLR, iSogCLR and FastCLIP v0 to v3, on one sweep over the pairs and one back."""

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

# Largest gradient and range of temperatures of samples (FastCLIP's code).
_LARGEST_GRADIENT = 5.0
_TEMPERATURES = (0.01, 1.0)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One loss of the family.

    Attributes:
      temperature: "constant", "learned": one for all, or "samples": each sample has two of its own, which learn.
      scaled: whether each sample's term is multiplied by its temperature in the paper.
      scaled_in_code: the same in the authors' code.
      gamma_schedule: of the papers, "constant" or "cosine" by epoch; the caller's concern.
      regularized: whether `rho` times the temperature is part of the loss.
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
    """Settings of Adam for temperatures of samples."""

    beta1: float
    beta2: float
    eps: float


_ADAM = _Adam(0.9, 0.999, 1e-8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """The static part of one call."""

    variant: Variant
    published: bool
    eps: float
    rho: float
    temperature_learning_rate: float | None
    temperature_adam: _Adam
    implementation: str | None

    @property
    def factor(self) -> float:
        """Of the whole loss."""
        return 1.0 if self.published else 0.5

    @property
    def scaled(self) -> bool:
        """Whether terms are multiplied by their temperature."""
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
    """Contrastive loss of each sample against the whole dataset, of which the state remembers a moving average.

    With `s_ij` the similarity of image i and text j of the global batch, b its size and t1, t2 the temperatures of
    images and texts (one for all, or two for each sample):

        g1_i = 1/(b-1) sum_{j != i} exp((s_ij - s_ii) / t1_i)       u1_i <- (1 - gamma) u1_i + gamma g1_i
        g2_i = 1/(b-1) sum_{j != i} exp((s_ji - s_ii) / t2_i)       u2_i <- (1 - gamma) u2_i + gamma g2_i
        loss = k mean_i(c1_i log(eps + u1_i) + c2_i log(eps + u2_i) + rho (t1_i + t2_i))

    A sample that has not been seen takes `u <- g`. The gradient is the estimator of the papers, as if
    `d log(eps + u) = dg / (eps + u)`: not that of the scalar, which depends on earlier batches. The value and the
    gradient are the same for any number of devices. Everything is computed in logarithms, so nothing overflows.

    | variant | c | temperature | rho |
    | --- | --- | --- | --- |
    | "sogclr", "fastclip_v1" | t | constant | |
    | "isogclr", "fastclip_v2" | t of the sample | of each sample, learned here with Adam | yes |
    | "fastclip_v0" | 1 | one, learned through `logit_scale` | |
    | "fastclip_v3" | t | one, learned through `logit_scale` | yes |

    The pairs "sogclr", "fastclip_v1" and "isogclr", "fastclip_v2" differ in the schedule of `gamma` alone.

    `mode="published"`: k = 1, as in the papers. "reference": as the authors' code computes, with which they tuned: k =
    1/2, c = 1 except for "fastclip_v3", the pairs' part of the temperature's gradient counted twice, and without `eps`
    beside u in the temperature's gradient of "fastclip_v3".

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
      image: `[b, D]` L2-normalised features, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      index: int `[b]`, the sample of the dataset that each row is. Where one is there twice, each row's gradient uses
        its own u, and the state keeps that of the last.
      state: of `create_samples`, with `temperature` for the variants with temperatures of samples.
      variant: one of `VARIANTS`.
      gamma: scalar in [0, 1], the inner learning rate. With 0, u of a seen sample never changes. The gradient's factor
        g / (eps + u) is at most 1 / gamma, so unbounded with 0.
      logit_scale: scalar, the inverse of the one temperature; None for variants with temperatures of samples.
      epoch: int, how often the dataset has been passed; for temperatures of samples alone, whose Adam it corrects.
      temperature_learning_rate: of the temperatures of samples; for those alone.
      temperature_beta1: decay of the first moment of the samples' temperatures, in [0, 1); 0 in the first epoch.
        FastCLIP's code passes beta1, beta2 and eps of the optimizer of the parameters.
      temperature_beta2: decay of their second moment, in [0, 1); 0 in the first epoch.
      temperature_eps: added to the root of their second moment.
      rho: weight of the temperatures in the loss; for the variants of the table alone.
      eps: added to u.
      mode: "published" or "reference".
      axis_name: as in `clip_loss`.
      mesh: as in `clip_loss`.
      mask: bool `[b]`, False for masked pairs (padding), whose features and index may hold anything.
      implementation: see `pairwise_lse`.
      rows_only: leave the state alone and return the batch's new rows of it, for `write_samples`: for a step of several
        programs, of which only the last may overwrite the state.

    Returns:
      The scalar, in fp32 (fp64 for fp64 features), and the new state (or rows); NaN if a sample is not of the state.

    Raises:
      ValueError: shapes, dtypes or settings do not fit, an index known to be out of range, or the devices cannot share
        the batch evenly.
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
    inside, known_mask = axis_name is not None and mesh is None, mask  # under jit, jax.numpy traces known values too
    mask = checked_mask("mask", mask, image.shape[0])
    index = _checked_index(index, known_mask, None if inside else state, image.shape[0])
    scalars = tuple(
        None if value is None else checked_scalar(name, value, image)
        for name, value in (("gamma", _checked_gamma(gamma)), ("logit_scale", logit_scale), ("epoch", epoch))
    )
    sharded = (image, text, index, lax.stop_gradient(state), mask)
    found, rows = over_mesh(_loss, plan, sharded, scalars, axis_name=axis_name, mesh=mesh, sharded_result=(False, True))
    if rows_only:
        return found, rows
    index = index if mask is None else jnp.where(mask, index, jnp.full_like(index, -1))
    return found, write_samples(state, index, rows, axis_name=axis_name, mesh=mesh)


def _loss(plan: _Plan, axis_name: AxisName | None, sharded: Any, scalars: Any) -> tuple[Array, SampleState]:
    """One device's part of the batch: the loss of all devices, and the new rows of its own samples."""
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
        """`[b/n, 2]`: log g."""
        x_scale, y_scale = (scale, scale) if scale.ndim == 0 else (scale[:, 0], scale[:, 1])
        found = pairwise_lse(
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
        logs = found.row - x_scale * found.positive, found.col - y_scale * found.positive
        return jnp.stack(logs, axis=1) - jnp.log(jnp.maximum(count - 1, 1))

    if kind == "constant":
        log_g, pull = jax.vjp(lambda image, text: log_means(image, text, scale), image, text)
    else:
        log_g, pull = jax.vjp(log_means, image, text, 1 / tau if kind == "samples" else scale)
    log_u = _moving_average(old.log_u, log_g, gamma)
    with_eps = jnp.logaddexp(log_u, jnp.full_like(log_u, math.log(plan.eps)))
    share = plan.factor / count  # of one pair in the loss
    weight = share * tau if plan.scaled else jnp.full_like(tau, 1) * share
    gradients = pull(jnp.where(exists, weight * jnp.exp(log_g - with_eps), jnp.zeros_like(tau)))

    rho = plan.rho if plan.variant.regularized else 0.0
    value = _sum_where(exists, weight * with_eps + share * rho * tau)
    new = SampleState(log_u)
    if kind == "samples":
        slope = with_eps + plan.rho - gradients[2] / (weight * tau)
        new = _move_temperatures(old, log_u, slope, epoch, plan)
        gradients = (*gradients[:2], None)
    elif kind == "learned":
        d_scale = gradients[2] if plan.published else 2 * gradients[2]
        if plan.scaled:  # the temperature as a factor of the loss
            logs = with_eps if plan.published else log_u
            d_scale = d_scale - share * _sum_where(exists, tau**2 * (logs + rho))
        gradients = (*gradients[:2], d_scale)
    else:
        gradients = (*gradients, jnp.zeros_like(scale))
    return global_sum(_with_gradients(value, primals, gradients), axis_name), new


def _moving_average(log_u: Array, log_g: Array, gamma: Array) -> Array:
    """The logarithm of `(1 - gamma) u + gamma g`, and of g where u is 0: a sample that has not been seen."""
    moved = jnp.logaddexp(jnp.log1p(-gamma) + log_u, jnp.log(gamma) + log_g)
    return jnp.where(jnp.isneginf(log_u), log_g, moved)


def _move_temperatures(old: SampleState, log_u: Array, slope: Array, epoch: Array, plan: _Plan) -> SampleState:
    """Adam on each sample's temperature, without memory in the first epoch and corrected by the epochs passed."""
    slope = jnp.clip(slope, -_LARGEST_GRADIENT, _LARGEST_GRADIENT)
    first_epoch, adam = epoch == 0, plan.temperature_adam

    def moment(old: Array, new: Array, beta: float) -> tuple[Array, Array]:
        mean = jnp.where(first_epoch, new, beta * old + (1 - beta) * new)
        correction = -jnp.expm1((epoch + 1) * math.log(beta)) if beta else jnp.ones_like(epoch)
        return mean, jnp.where(first_epoch, mean, mean / correction)

    first, direction = moment(old.first_moment, slope, adam.beta1)
    second, square = moment(old.second_moment, slope**2, adam.beta2)
    temperature = old.temperature - plan.temperature_learning_rate * direction / (jnp.sqrt(square) + adam.eps)
    return SampleState(log_u, jnp.clip(temperature, *_TEMPERATURES), first, second)


@jax.custom_vjp
def _with_gradients(value: Array, primals: Any, gradients: Any) -> Array:
    """`value` as a function of `primals` with the given gradients."""
    return value


def _forward(value: Array, primals: Any, gradients: Any) -> tuple[Array, Any]:
    return value, gradients


def _backward(gradients: Any, cotangent: Array) -> tuple[None, Any, None]:
    return None, jax.tree.map(lambda g: (cotangent * g.astype(cotangent.dtype)).astype(g.dtype), gradients), None


_with_gradients.defvjp(_forward, _backward)


def _sum_where(exists: Array, values: Array) -> Array:
    return jnp.where(exists, values, jnp.zeros_like(values)).sum()


def _checked_index(index: Array, mask: Array | None, state: SampleState | None, rows: int) -> Array:
    """The index as int32. `state` is None inside `shard_map`, where its rows are one device's."""
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
    """Raises `ValueError` unless the variant has what it needs and nothing that it does not use."""
    if not plan.eps > 0:
        raise ValueError(f"expected eps > 0, got {plan.eps}")
    if plan.rho and not plan.variant.regularized:
        raise ValueError(f"expected no rho for {name}, which has none, got {plan.rho}")
    own, adam = plan.variant.temperature == "samples", plan.temperature_adam
    for what, beta in (("temperature_beta1", adam.beta1), ("temperature_beta2", adam.beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"expected 0 <= {what} < 1, got {beta}")
    if not adam.eps > 0:
        raise ValueError(f"expected temperature_eps > 0, got {adam.eps}")
    if adam != _ADAM and not own:
        raise ValueError(f"expected no temperature_beta1, temperature_beta2, temperature_eps for {name}, got {adam}")
    needed = {
        "logit_scale": (logit_scale, not own),
        "epoch": (epoch, own),
        "temperature_learning_rate": (plan.temperature_learning_rate, own),
        "temperatures in the state": (state.temperature, own),
    }
    for what, (value, wanted) in needed.items():
        if (value is not None) != wanted:
            raise ValueError(f"expected {'' if wanted else 'no '}{what} for {name}, got {'none' if wanted else 'one'}")
