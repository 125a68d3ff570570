"""Temperature gradients of the global contrastive losses, and Adam for per-sample temperatures."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from infcl_jax.losses.batch import Array
from infcl_jax.losses.samples import SampleState
from infcl_jax.losses.variants import Settings

# Clipping of the gradients of per-sample temperatures, and range of these temperatures (FastCLIP's code).
_MAX_GRADIENT = 5.0
_RANGE = (0.01, 1.0)


class Terms(NamedTuple):
    """Terms of the loss, `[b/n, 2]`: images in column 0, texts in column 1.

    Attributes:
      tau: temperatures t.
      log_u: log u.
      log_u_eps: log(eps + u).
      weight: k c / b with the number b of unmasked pairs.
      mean: k / b, scalar.
      valid: bool `[b/n, 1]`, False for masked rows.
    """

    tau: Array
    log_u: Array
    log_u_eps: Array
    weight: Array
    mean: Array
    valid: Array

    def sum(self, values: Array) -> Array:
        """Sum `values` over the unmasked rows."""
        return jnp.where(self.valid, values, jnp.zeros_like(values)).sum()


def scale_gradient(settings: Settings, terms: Terms, d_pairs: Array) -> Array:
    """Gradient of the learned scale s = 1/t.

    With the gradient D through the pairs (`d_pairs`), in mode "published":

        "fastclip_v0"    D
        "fastclip_v3"    D - t^2 k mean_i(log(eps + u1_i) + log(eps + u2_i) + 2 rho)

    Mode "reference" has 2 D, and u instead of eps + u. The result is the contribution of the local rows.
    """
    d_scale = d_pairs if settings.published else 2 * d_pairs
    if not settings.scaled:
        return d_scale
    log_mean = terms.log_u_eps if settings.published else terms.log_u
    return d_scale - terms.mean * terms.sum(terms.tau**2 * (log_mean + settings.rho))


def per_sample_gradient(settings: Settings, terms: Terms, d_pairs: Array) -> Array:
    """Gradient of the per-sample temperatures, times b.

    With the gradient D_i with respect to 1/t_i through the pairs (`d_pairs`):

        "isogclr", "fastclip_v2"    log(eps + u_i) + rho - D_i b / (k c_i t_i)
    """
    return terms.log_u_eps + settings.rho - d_pairs / (terms.weight * terms.tau)


def adam_update(settings: Settings, old: SampleState, log_u: Array, gradient: Array, epoch: Array) -> SampleState:
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
