"""Estimate of a global contrastive loss and its gradients from one batch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from infcl_jax.losses.batch import Array, AxisName, global_sum
from infcl_jax.losses.samples import SampleState, read_samples
from infcl_jax.losses.variants import Settings
from infcl_jax.ops.common.derivatives import not_differentiated, only_reverse
from infcl_jax.ops.pairwise.base import varying_over
from infcl_jax.ops.pairwise.checks import check_axis
from infcl_jax.ops.pairwise.lse import pairwise_lse

# Clipping of the gradients of per-sample temperatures, and range of these temperatures (FastCLIP's code).
_MAX_GRADIENT = 5.0
_RANGE = (0.01, 1.0)
_ESTIMATE = "the gradient of a global contrastive loss is an estimate, not the derivative of its value"


def estimate(settings: Settings, axis_name: AxisName | None, sharded: Any, scalars: Any) -> tuple[Array, SampleState]:
    """Compute the global loss and the new state rows of the local batch.

    `infcl_jax.global_contrastive_loss` has the formulas. The signature is as `over_mesh` calls it: `sharded` is (image,
    text, index, state, mask), `scalars` is (gamma, logit_scale, epoch).
    """
    image, text, index, state, mask = sharded
    gamma, scale, epoch = scalars
    check_axis(axis_name, image, text)
    primals = only_reverse(varying_over((image, text, scale), axis_name), _ESTIMATE)
    image, text, scale = lax.stop_gradient(primals)
    valid = jnp.ones((len(index), 1), bool) if mask is None else mask[:, None]
    count = global_sum(varying_over(valid.sum().astype(gamma.dtype), axis_name), axis_name)
    rows = read_samples(state, jnp.where(valid[:, 0], index, jnp.zeros_like(index)), axis_name)
    old = jax.tree.map(lambda a: a.astype(gamma.dtype), rows)
    tau = old.temperature if settings.variant.per_sample else jnp.broadcast_to(1 / scale, old.log_u.shape)

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
            implementation=settings.implementation,
        )
        log_sums = negatives.row - x_scale * negatives.positive, negatives.col - y_scale * negatives.positive
        return jnp.stack(log_sums, axis=1) - jnp.log(jnp.maximum(count - 1, 1))

    if settings.variant.temperature == "constant":
        log_g, pullback = jax.vjp(lambda image, text: log_means(image, text, scale), image, text)
    else:
        log_g, pullback = jax.vjp(log_means, image, text, 1 / tau if settings.variant.per_sample else scale)

    # u <- (1 - gamma) u + gamma g
    log_u = _moving_average(old.log_u, log_g, gamma)
    # k mean_i(c log(eps + u) + rho tau)
    log_u_eps = jnp.logaddexp(log_u, jnp.full_like(log_u, math.log(settings.eps)))
    mean = settings.factor / count
    weight = mean * tau if settings.scaled else jnp.full_like(tau, 1) * mean

    def local_sum(values: Array) -> Array:
        return jnp.where(valid, values, jnp.zeros_like(values)).sum()

    value = local_sum(weight * log_u_eps + mean * settings.rho * tau)
    # d log(eps + u) = dg / (eps + u)
    d_log_g = jnp.where(valid, weight * jnp.exp(log_g - log_u_eps), jnp.zeros_like(tau))
    d_image, d_text, *d_temperature = pullback(d_log_g)

    new_rows, d_scale = SampleState(log_u), None
    if settings.variant.per_sample:
        # d (k c mean_i(...)) / dt, times b: with D = dL/d(1/t) through the pairs, log(eps + u) + rho - D b / (k c t)
        gradient = log_u_eps + settings.rho - d_temperature[0] / (weight * tau)
        new_rows = _adam_update(settings, old, log_u, gradient, epoch)
    elif settings.variant.temperature == "learned":
        # The gradient of s = 1/t: D, minus t^2 k mean_i(log(eps + u1) + log(eps + u2) + 2 rho) where c = t. The
        # authors' code has 2 D, and u instead of eps + u.
        d_scale = d_temperature[0] if settings.published else 2 * d_temperature[0]
        if settings.scaled:
            log_mean = log_u_eps if settings.published else log_u
            d_scale = d_scale - mean * local_sum(tau**2 * (log_mean + settings.rho))
    else:
        d_scale = jnp.zeros_like(scale)
    loss = _with_gradients(value, primals, (d_image, d_text, d_scale))
    return global_sum(loss, axis_name), new_rows


def _moving_average(log_u: Array, log_g: Array, gamma: Array) -> Array:
    """Compute `log((1 - gamma) u + gamma g)`; an unseen sample (u = 0) takes log g."""
    average = jnp.logaddexp(jnp.log1p(-gamma) + log_u, jnp.log(gamma) + log_g)
    return jnp.where(jnp.isneginf(log_u), log_g, average)


def _adam_update(settings: Settings, old: SampleState, log_u: Array, gradient: Array, epoch: Array) -> SampleState:
    """Apply Adam to the per-sample temperatures.

    A sample occurs once per epoch, so the bias correction counts epochs. The first epoch ignores the stored moments.
    """
    gradient = jnp.clip(gradient, -_MAX_GRADIENT, _MAX_GRADIENT)
    first_epoch, adam = epoch == 0, settings.temperature_adam

    def moment(old: Array, new: Array, beta: float) -> tuple[Array, Array]:
        """Return the updated moment, and the moment with bias correction."""
        mean = jnp.where(first_epoch, new, beta * old + (1 - beta) * new)
        correction = -jnp.expm1((epoch + 1) * math.log(beta)) if beta else jnp.ones_like(epoch)
        return mean, jnp.where(first_epoch, mean, mean / correction)

    m, m_hat = moment(old.first_moment, gradient, adam.beta1)
    v, v_hat = moment(old.second_moment, gradient**2, adam.beta2)
    temperature = old.temperature - settings.temperature_learning_rate * m_hat / (jnp.sqrt(v_hat) + adam.eps)
    return SampleState(log_u, jnp.clip(temperature, *_RANGE), m, v)


@jax.custom_vjp
def _with_gradients(value: Array, primals: Any, gradients: Any) -> Array:
    """Return `value`, whose gradients with respect to `primals` are `gradients`."""
    return value


def _forward(value: Array, primals: Any, gradients: Any) -> tuple[Array, Any]:
    return value, not_differentiated(gradients, primals, _ESTIMATE)


def _backward(gradients: Any, cotangent: Array) -> tuple[None, Any, None]:
    return None, jax.tree.map(lambda g: (cotangent * g.astype(cotangent.dtype)).astype(g.dtype), gradients), None


_with_gradients.defvjp(_forward, _backward)
