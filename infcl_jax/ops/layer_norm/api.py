"""LayerNorm on fused Hopper kernels or plain XLA."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Shaped

from infcl_jax.ops.common import gpu
from infcl_jax.ops.common.sharding import automatic_axes, on_each_device, rows_for_kernels

NormImplementation = Literal["xla", "mosaic_gpu"]
LAYER_NORM_EPSILON = 1e-5  # added to the variance; PyTorch's default

Rows = Float[Array, "*batch width"]
Vector = Float[Array, "width"]
Statistic = Float32[Array, "*batch 1"]  # of each row
# Cotangents of rows, scale and bias, and the sum of the first one over rows.
Gradients = tuple[Rows, Float32[Array, "width"], Float32[Array, "width"], Float32[Array, "width"] | None]


def best_normalization(x: Float[Array | jax.ShapeDtypeStruct, "*batch width"], *dtypes: Any) -> NormImplementation:
    """Select the fastest LayerNorm for the target device.

    Args:
      x: [..., width], argument of the LayerNorm.
      *dtypes: dtypes of the results.

    Returns:
      "mosaic_gpu" if the kernels support the shape and dtypes and each device holds whole rows, see `rows_for_kernels`,
      at least `gpu.FEWEST_ROWS`. Otherwise "xla", which the compiler can partition. A width or dtype without kernels is
      logged once.
    """
    rows = rows_for_kernels(x.shape)
    if rows is None:
        return "xla"
    from infcl_jax.ops.layer_norm import pallas_mosaic_gpu  # needed on GPUs only

    width = x.shape[-1]
    if not pallas_mosaic_gpu.has_layout(width, x.dtype, *dtypes):
        names = " and ".join(dict.fromkeys(jnp.dtype(d).name for d in (x.dtype, *dtypes)))
        gpu.log_fallback("LayerNorm", f"width {width} in {names}", pallas_mosaic_gpu.SUPPORTED)
        return "xla"
    return "mosaic_gpu" if rows >= gpu.FEWEST_ROWS else "xla"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def normalize(
    x: Float[Array, "*batch width"],
    scale: Float[Array, "width"],
    bias: Float[Array, "width"],
    dtype: Any,
    implementation: NormImplementation | None = None,
    epsilon: float = LAYER_NORM_EPSILON,
) -> Float[Array, "*batch width"]:
    """LayerNorm over the last axis (Ba et al. 2016), computed in float32.

    Args:
      x: [..., width], floating.
      scale: [width].
      bias: [width].
      dtype: dtype of the result.
      implementation: "xla", or "mosaic_gpu" for the Hopper kernels; None for `best_normalization`.
      epsilon: constant added to the variance.

    Returns:
      [..., width] in `dtype`.
    """
    return _forward(x, scale, bias, dtype, implementation, epsilon)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def normalize_with_residual(
    x: Float[Array, "*batch width"],
    scale: Float[Array, "width"],
    bias: Float[Array, "width"],
    deferred_bias: Float[Array, "width"] | None,
    dtype: Any,
    implementation: NormImplementation | None = None,
    epsilon: float = LAYER_NORM_EPSILON,
) -> tuple[Float[Array, "*batch width"], Float[Array, "*batch width"]]:
    """LayerNorm and residual input; the backward pass fuses both cotangents.

    Use the returned `x` for the residual connection. The kernels then add the cotangents of both uses of `x` before
    rounding and without another pass over memory. In the same pass they sum the cotangent of `x` over rows, which is
    the gradient of `deferred_bias`.

    Args:
      x: [..., width], floating.
      scale: [width].
      bias: [width].
      deferred_bias: [width], bias already added to every row of `x` under `stop_gradient`, for its gradient; None for
        no bias.
      dtype: dtype of the normalized result.
      implementation: "xla", or "mosaic_gpu" for the Hopper kernels; None for `best_normalization`.
      epsilon: constant added to the variance.

    Returns:
      The result of `normalize` in `dtype`, and `x`, both [..., width].
    """
    return _forward(x, scale, bias, dtype, implementation, epsilon)[0], x


def _forward(
    x: Rows, scale: Vector, bias: Vector, dtype: Any, implementation: NormImplementation | None, epsilon: float
) -> tuple[Rows, tuple[jax.Array, ...]]:
    run = _forward_xla if _chosen(implementation, x, dtype) == "xla" else _forward_kernel
    y, mean, inv_std = run(x, scale, bias, dtype, epsilon)
    return y, (x, mean, inv_std, scale, bias)


def _backward(
    dtype: Any, implementation: NormImplementation | None, epsilon: float, saved: tuple[jax.Array, ...], dy: Rows
) -> tuple[jax.Array | None, ...]:
    return _backward_with_residual(dtype, implementation, epsilon, (*saved, None), (dy, None))[:3]


def _forward_with_residual(
    x: Rows, scale: Vector, bias: Vector, deferred_bias: Vector | None, *settings: Any
) -> tuple[tuple[Rows, Rows], tuple[jax.Array | None, ...]]:
    y, saved = _forward(x, scale, bias, *settings)
    return (y, x), (*saved, deferred_bias)


def _backward_with_residual(
    dtype: Any,
    implementation: NormImplementation | None,
    epsilon: float,
    saved: tuple[Any, ...],
    cotangents: tuple[Rows, Rows | None],
) -> tuple[jax.Array | None, ...]:
    x, mean, inv_std, scale, bias, deferred_bias = saved
    run = _backward_xla if _chosen(implementation, x, dtype) == "xla" else _backward_kernel
    dx, *sums = run(x, mean, inv_std, scale, *cotangents, sum_rows=deferred_bias is not None)
    vectors = (scale, bias, deferred_bias)
    return dx, *(None if v is None else dv.astype(v.dtype) for v, dv in zip(vectors, sums, strict=True))


normalize.defvjp(_forward, _backward)
normalize_with_residual.defvjp(_forward_with_residual, _backward_with_residual)


def _chosen(implementation: NormImplementation | None, x: jax.Array, dtype: Any) -> NormImplementation:
    return implementation or best_normalization(x, dtype)


def _forward_xla(x: Rows, scale: Vector, bias: Vector, dtype: Any, epsilon: float) -> tuple[Rows, Statistic, Statistic]:
    """Compute the result, and the float32 mean and inverse standard deviation [..., 1].

    The variance is E[x^2] - E[x]^2, so both statistics take a single pass over `x`.
    """
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.mean(x32 * x32, axis=-1, keepdims=True) - mean * mean, 0.0)
    inv_std = lax.rsqrt(variance + epsilon)
    y = (x32 - mean) * inv_std * broadcast_vector(scale, x) + broadcast_vector(bias, x)
    return y.astype(dtype), mean, inv_std


def _backward_xla(
    x: Rows, mean: Statistic, inv_std: Statistic, scale: Vector, dy: Rows, dx_residual: Rows | None, sum_rows: bool
) -> Gradients:
    """Compute the gradients of LayerNorm.

    Returns:
      The cotangent of `x` in its dtype. The float32 [width] cotangents of scale and bias. The float32 [width] sum over
      rows of the cotangent of `x`, None without `sum_rows`.
    """
    # Without the barrier, XLA shares subexpressions of the two passes and stores them in float32.
    x, mean, inv_std, scale = lax.optimization_barrier((x, mean, inv_std, scale))
    dy32 = dy.astype(jnp.float32)
    x_hat = (x.astype(jnp.float32) - mean) * inv_std
    leading_axes = tuple(range(x.ndim - 1))
    d_scale, d_bias = (dy32 * x_hat).sum(leading_axes), dy32.sum(leading_axes)
    dx_hat = dy32 * broadcast_vector(scale, x)
    projection = jnp.mean(dx_hat * x_hat, axis=-1, keepdims=True)
    dx = inv_std * (dx_hat - jnp.mean(dx_hat, axis=-1, keepdims=True) - x_hat * projection)
    dx = dx.astype(x.dtype)
    # dx_residual is added after rounding. The row sum reads dx too, so XLA would store an unrounded dx in float32.
    dx = dx if dx_residual is None else dx + dx_residual
    return dx, d_scale, d_bias, dx.sum(leading_axes, dtype=jnp.float32) if sum_rows else None


def _forward_kernel(
    x: Rows, scale: Vector, bias: Vector, dtype: Any, epsilon: float
) -> tuple[Rows, Statistic, Statistic]:
    from infcl_jax.ops.layer_norm import pallas_mosaic_gpu

    run = functools.partial(
        pallas_mosaic_gpu.forward, dtype=jnp.dtype(dtype), epsilon=epsilon, sm_count=gpu.multiprocessors()
    )

    def local(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        y, *statistics = run(flat_rows(x), scale, bias)
        return y.reshape(x.shape), *(s.reshape(*x.shape[:-1], 1) for s in statistics)

    batch_spec = P(automatic_axes())
    run_on_each = on_each_device(local, (batch_spec, P(), P()), batch_spec)
    return run_on_each(x, scale.astype(jnp.float32), bias.astype(jnp.float32))


def _backward_kernel(
    x: Rows, mean: Statistic, inv_std: Statistic, scale: Vector, dy: Rows, dx_residual: Rows | None, sum_rows: bool
) -> Gradients:
    from infcl_jax.ops.layer_norm import pallas_mosaic_gpu

    run = functools.partial(pallas_mosaic_gpu.backward, sum_rows=sum_rows, sm_count=gpu.multiprocessors())
    axes = automatic_axes()

    def local(
        scale: jax.Array, mean: jax.Array, inv_std: jax.Array, *arrays: jax.Array
    ) -> tuple[jax.Array | None, ...]:
        x, *cotangents = (flat_rows(a) for a in arrays)
        dx, *sums = run(x, mean.reshape(-1), inv_std.reshape(-1), scale, *cotangents)
        return dx.reshape(arrays[0].shape), *(lax.psum(sums, axes) if axes else sums)

    arrays = (mean, inv_std, x, dy, *(() if dx_residual is None else (dx_residual,)))
    run_on_each = on_each_device(local, (P(), *(P(axes) for _ in arrays)), (P(axes), P(), P(), P()))
    return run_on_each(scale.astype(jnp.float32), *arrays)


def flat_rows(x: Shaped[Array, "*batch width"]) -> Shaped[Array, "rows width"]:
    """Reshape [..., width] to [rows, width]."""
    return x.reshape(-1, x.shape[-1])


def broadcast_vector(vector: Float[Array, "n"], x: Float[Array, "..."]) -> Float32[Array, "... n"]:
    """Reshape [width] to broadcast against `x` [..., width], as float32."""
    return vector.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + vector.shape)
