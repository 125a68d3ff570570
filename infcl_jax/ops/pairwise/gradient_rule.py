"""Custom VJP of a strategy, its backend and a loss.

Sums may be inexact, such as sums of exponentials with a shared max-shift (see `max_shift`). Then a general path
recomputes them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values
from jaxtyping import Bool, Float

from infcl_jax.ops.common.derivatives import not_reversed
from infcl_jax.ops.pairwise.base import Array, AxisName, Backend, Strategy, constant, varying_over
from infcl_jax.ops.pairwise.ids import Order
from infcl_jax.ops.pairwise.strips import loop_over_slices, update_rows

# Rows of a gradient that are scaled at a time: 64 MiB in fp32 for 512 features.
SCALED_ROWS = 1 << 15


@dataclasses.dataclass(frozen=True)
class Loss:
    """Loss on the pairs of all devices: how sums become results, and cotangents become gradients.

    The defaults suit a loss whose sums are always exact.

    Attributes:
      folder: folder of the loss in this package.
      gradient: named tuple of the gradients, see `base.Block`.
      forward_mode: what to use for derivatives in forward mode, which the rule does not have.
      other_derivatives: what to use for second derivatives in reverse mode, which the rule does not have.
    """

    folder: ClassVar[str]
    gradient: ClassVar[Any]
    forward_mode: ClassVar[str]
    other_derivatives: ClassVar[str] = "use forward over reverse, such as jax.jvp of jax.grad"

    def prepared(self, backend: Backend, block: Any) -> Any:
        """Return this device's block with what is computed once of its own rows and columns."""
        return block

    def results(self, block: Any, sums: Any) -> Any:
        """Convert exact sums over all devices into the results."""
        return sums

    def cotangents(self, sums: Any, d_results: Any) -> Any:
        """Join sums with the cotangents of the results, as inputs of the backward pass."""
        return d_results

    def exact(self, block: Any, sums: Any, devices: int) -> Bool[Array, ""] | None:
        """Return whether this device's sums are exact; None if they always are."""
        return None

    def general(self, backend: Backend, block: Any) -> tuple[Backend, Any]:
        """Return the backend and the block whose sums are always exact."""
        return backend, block

    def general_gradients(self, gradients: Callable[..., Any], backend: Backend, block: Any, *arguments: Any) -> Any:
        """Compute the gradients of the general path.

        Args:
          gradients: function of a backend, a block, its sums and the flags of the required gradients.
          backend: backend of the first path.
          block: block of the first path.
          *arguments: exact sums, and the flags of the required gradients.
        """
        return gradients(*self.general(backend, block), *arguments)

    def restore(self, results: Any, x_order: Order, y_order: Order) -> Any:
        """Return the results of sorted rows and columns in the caller's order; by default the results of rows."""
        return jax.tree.map(x_order.restore, results)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static arguments of one call."""

    loss: Loss
    strategy: Strategy
    backend: Backend
    axis_name: AxisName | None

    def sums(self, block: Any) -> tuple[Any, Bool[Array, ""] | None, Any]:
        """Compute the sums of this device's rows and columns over all devices.

        Returns:
          The first sums, whether they are exact on all devices (None if they always are), and exact sums.
        """
        axis_name = self.axis_name
        first = self.strategy.forward(self.backend, block, axis_name=axis_name)
        exact = self.loss.exact(block, first, 1 if axis_name is None else lax.axis_size(axis_name))
        if exact is None:
            return first, None, first
        if axis_name is not None:
            # One decision for all blocks and devices: it costs one collective and, on GPUs, one host synchronization.
            exact = lax.pmin(varying_over(exact.astype(jnp.int32), axis_name), axis_name) > 0

        def recompute() -> Any:
            return self.strategy.forward(*self.loss.general(self.backend, block), axis_name=axis_name)

        return first, exact, unless_exact(exact, first, recompute)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(plan: Plan, block: Any) -> Any:
    """Compute the results of a loss over all devices from this device's block, with a custom VJP."""
    return plan.loss.results(block, plan.sums(block)[-1])


def _forward(plan: Plan, primals: Any) -> tuple[Any, tuple]:
    block = custom_vjp_primal_tree_values(primals)
    first, exact, final = plan.sums(block)
    perturbed = encode_perturbed(primals[: len(plan.loss.gradient._fields)])
    return plan.loss.results(block, final), (block, first, exact, final, perturbed)


def _backward(plan: Plan, residuals: tuple, d_results: Any) -> tuple:
    block, first, exact, final, perturbed = residuals
    needs_grad = plan.loss.gradient(*decode_perturbed(perturbed))
    d_results = jax.tree.map(lambda d: instantiate(d, block.x), d_results)
    # The cotangents of a mean contain 1/b. Dividing by a power of two before the GEMMs, and multiplying after them, is
    # exact and keeps dS from underflow.
    grad_scale = feature_scale = power_of_two_bound(d_results, plan.axis_name)
    d_results = jax.tree.map(lambda d: d / grad_scale, d_results)
    if (scale := getattr(block, "scale", None)) is not None:  # fused backends compute dX of a scale of 0 as of 1
        feature_scale = jnp.where(scale == 0, jnp.zeros_like(grad_scale), grad_scale)

    def gradients(backend: Backend, block: Any, sums: Any, needs_grad: Any) -> Any:
        cotangents = plan.loss.cotangents(sums, d_results)
        x, y, *others = plan.strategy.backward(
            backend, block, cotangents, axis_name=plan.axis_name, needs_grad=needs_grad
        )
        features = (None if d is None else scaled(d, feature_scale, block.x.dtype) for d in (x, y))
        return plan.loss.gradient(*features, *(None if d is None else d * grad_scale for d in others))

    # The first sums are used whether they are exact or not, so that the backward pass is enqueued before the host
    # synchronizes.
    grads = gradients(plan.backend, block, first, needs_grad)
    if exact is not None:
        general = functools.partial(plan.loss.general_gradients, gradients, plan.backend, block, final, needs_grad)
        grads = unless_exact(exact, grads, general)
    grads = not_reversed(grads, plan.loss.other_derivatives)
    return (type(block)(*grads, *[None] * (len(block) - len(grads))),)


blockwise.defvjp(_forward, _backward, symbolic_zeros=True)


def unless_exact[T](exact: Bool[Array, ""], value: T, recompute: Callable[[], T]) -> T:
    """Return `value` if `exact`, else `recompute()`.

    On GPUs the host evaluates the condition, so it synchronizes on `exact`. Work enqueued before is not delayed. A loop
    with zero iterations returns `value` without a copy, unlike a conditional.
    """
    return lax.while_loop(lambda state: ~state[0], lambda _: (jnp.ones_like(exact), recompute()), (exact, value))[1]


def encode_perturbed(primals: Sequence[CustomVJPPrimal | None]) -> Bool[Array, "0 *flags"]:
    """Encode which arguments are perturbed as the shape of an empty residual.

    Array shapes belong to one trace, the pytree structure of residuals does not: JAX stores one structure for each
    `custom_vjp` call and overwrites it when the forward rule is traced again (tests/ops/test_jax_residuals.py).
    Flags in the structure would give the backward rule of one trace another trace's flags.
    """
    return jnp.zeros((0, *(int(p is not None and p.perturbed) for p in primals)), bool)


def decode_perturbed(perturbed: Bool[Array, "0 *flags"]) -> tuple[bool, ...]:
    """Return the flags encoded by `encode_perturbed`."""
    return tuple(map(bool, perturbed.shape[1:]))


def instantiate(cotangent: Array | SymbolicZero, like: Array) -> Array:
    """Return a cotangent as an array that varies over the mesh axes of `like`."""
    if isinstance(cotangent, SymbolicZero):
        return constant(cotangent.shape, 0, cotangent.dtype, varying_like=like)
    return cotangent


def scaled(array: Float[Array, "n d"], factor: Float[Array, ""], dtype: jnp.dtype) -> Float[Array, "n d"]:
    """Multiply by `factor` and round once to `dtype`.

    If the dtype stays the same, slices are updated in place. XLA would otherwise allocate a copy of the whole array.
    """
    if array.dtype != dtype:
        return (array * factor).astype(dtype)

    def multiply(first: Array, count: int, array: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(array, first, count)
        return update_rows(array, rows.astype(factor.dtype) * factor, first)

    return loop_over_slices(array.shape[0], min(array.shape[0], SCALED_ROWS), multiply, array)


def power_of_two_bound(cotangents: Any, axis_name: AxisName | None) -> Float[Array, ""]:
    """Return the power of two above the largest absolute cotangent.

    The maximum is over all devices. The result is 1 if all cotangents are zero.
    """
    # Constant almost everywhere, and JAX does not differentiate `pmax`.
    cotangents = jax.tree.map(lax.stop_gradient, cotangents)
    largest = jnp.stack([jnp.abs(c).max() for c in jax.tree.leaves(cotangents)]).max()
    if axis_name is not None:
        largest = lax.pmax(varying_over(largest, axis_name), axis_name)
    power = jnp.ldexp(jnp.ones_like(largest), jnp.frexp(largest)[1])
    return jnp.where(largest > 0, power, jnp.ones_like(power))
