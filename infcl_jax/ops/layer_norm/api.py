"""LayerNorm: fused kernels on Hopper GPUs, or plain XLA."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from infcl_jax.ops.common import gpu
from infcl_jax.ops.common.sharding import automatic_axes, on_each_device, rows_for_kernels

NormImplementation = Literal["xla", "mosaic_gpu"]
LAYER_NORM_EPSILON = 1e-5


def best_normalization(x: jax.Array, *dtypes: Any) -> NormImplementation:
    """The fastest LayerNorm on the default device.

    Args:
      x: [..., width], the argument.
      dtypes: of the result.

    Returns:
      "mosaic_gpu" with an argument that the kernels accept and of which each device has whole rows, see
      `rows_for_kernels`. Otherwise "xla", which the compiler can split.
    """
    rows = rows_for_kernels(x.shape)
    if rows is None:
        return "xla"
    from infcl_jax.ops.layer_norm import pallas_mosaic_gpu  # only GPUs need it

    return "mosaic_gpu" if pallas_mosaic_gpu.accepts(rows, x.shape[-1], x.dtype, *dtypes) else "xla"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalize(
    x: jax.Array, scale: jax.Array, bias: jax.Array, dtype: Any, implementation: NormImplementation | None = None
) -> jax.Array:
    """LayerNorm (Ba et al. 2016) over the last axis.

    Args:
      x: [..., width], floating.
      scale: [width].
      bias: [width].
      dtype: of the result.
      implementation: "xla", or "mosaic_gpu" for the kernels of Hopper GPUs; None for `best_normalization`.

    Returns:
      [..., width]; float32 throughout.
    """
    return _forward(x, scale, bias, dtype, implementation)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def normalize_beside(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    added: jax.Array | None,
    dtype: Any,
    implementation: NormImplementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`normalize`, and `x` itself, to be used in place of `x` where it is also passed on unchanged.

    The kernels then add the cotangents of both uses before they round, and without another pass over them. On the way
    they add up the rows of the sum: the gradient of a vector that `x` contains.

    Args:
      x: as for `normalize`.
      scale: likewise.
      bias: likewise.
      added: [width], a vector that was added to every row of `x` without gradient, and gets its gradient here; None for
        none.
      dtype: as for `normalize`.
      implementation: likewise.

    Returns:
      The result of `normalize`, and `x`.
    """
    return _forward(x, scale, bias, dtype, implementation)[0], x


def _forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, dtype: Any, implementation: NormImplementation | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    run = _forward_xla if _chosen(implementation, x, dtype) == "xla" else _forward_kernel
    y, mean, inverse = run(x, scale, bias, dtype)
    return y, (x, mean, inverse, scale, bias)


def _backward(
    dtype: Any, implementation: NormImplementation | None, saved: tuple[jax.Array, ...], of_y: jax.Array
) -> tuple[jax.Array | None, ...]:
    return _backward_beside(dtype, implementation, (*saved, None), (of_y, None))[:3]


def _forward_beside(
    x: jax.Array, scale: jax.Array, bias: jax.Array, added: jax.Array | None, *how: Any
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array | None, ...]]:
    y, saved = _forward(x, scale, bias, *how)
    return (y, x), (*saved, added)


def _backward_beside(
    dtype: Any,
    implementation: NormImplementation | None,
    saved: tuple[Any, ...],
    cotangents: tuple[jax.Array, jax.Array | None],
) -> tuple[jax.Array | None, ...]:
    x, mean, inverse, scale, bias, added = saved
    run = _backward_xla if _chosen(implementation, x, dtype) == "xla" else _backward_kernel
    of_x, *sums = run(x, mean, inverse, scale, *cotangents, sum_rows=added is not None)
    vectors = (scale, bias, added)
    return of_x, *(None if v is None else of_v.astype(v.dtype) for v, of_v in zip(vectors, sums, strict=True))


normalize.defvjp(_forward, _backward)
normalize_beside.defvjp(_forward_beside, _backward_beside)


def _chosen(implementation: NormImplementation | None, x: jax.Array, dtype: Any) -> NormImplementation:
    return implementation or best_normalization(x, dtype)


def _forward_xla(x: jax.Array, scale: jax.Array, bias: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
    """The result, and mean and inverse standard deviation [..., 1]; statistics from one pass over `x`."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.mean(wide * wide, axis=-1, keepdims=True) - mean * mean, 0.0)
    inverse = lax.rsqrt(variance + LAYER_NORM_EPSILON)
    y = (wide - mean) * inverse * along(scale, x) + along(bias, x)
    return y.astype(dtype), mean, inverse


def _backward_xla(
    x: jax.Array,
    mean: jax.Array,
    inverse: jax.Array,
    scale: jax.Array,
    of_y: jax.Array,
    beside: jax.Array | None,
    sum_rows: bool,
) -> tuple[jax.Array | None, ...]:
    """Cotangents of `x`, scale and bias, and the first of them summed over rows if asked for; all but it float32."""
    x, mean, inverse, scale = lax.optimization_barrier((x, mean, inverse, scale))
    slope = of_y.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * inverse
    rows = tuple(range(x.ndim - 1))
    of_scale, of_bias = (slope * normal).sum(rows), slope.sum(rows)
    slope = slope * along(scale, x)
    projection = jnp.mean(slope * normal, axis=-1, keepdims=True)
    of_x = inverse * (slope - jnp.mean(slope, axis=-1, keepdims=True) - normal * projection)
    of_x = of_x.astype(x.dtype)
    # A float32 sum would be stored as such, since rows are summed from it.
    of_x = of_x if beside is None else of_x + beside
    return of_x, of_scale, of_bias, of_x.sum(rows, dtype=jnp.float32) if sum_rows else None


def _forward_kernel(x: jax.Array, scale: jax.Array, bias: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
    from infcl_jax.ops.layer_norm import pallas_mosaic_gpu

    run = functools.partial(
        pallas_mosaic_gpu.forward, dtype=jnp.dtype(dtype), epsilon=LAYER_NORM_EPSILON, cores=gpu.multiprocessors()
    )

    def local(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        y, *statistics = run(flat_rows(x), scale, bias)
        return y.reshape(x.shape), *(s.reshape(*x.shape[:-1], 1) for s in statistics)

    own = P(automatic_axes())
    run_on_each = on_each_device(local, (own, P(), P()), own)
    return run_on_each(x, scale.astype(jnp.float32), bias.astype(jnp.float32))


def _backward_kernel(
    x: jax.Array,
    mean: jax.Array,
    inverse: jax.Array,
    scale: jax.Array,
    of_y: jax.Array,
    beside: jax.Array | None,
    sum_rows: bool,
) -> tuple[jax.Array | None, ...]:
    from infcl_jax.ops.layer_norm import pallas_mosaic_gpu

    run = functools.partial(pallas_mosaic_gpu.backward, sum_rows=sum_rows, cores=gpu.multiprocessors())
    axes = automatic_axes()

    def local(
        scale: jax.Array, mean: jax.Array, inverse: jax.Array, *arrays: jax.Array
    ) -> tuple[jax.Array | None, ...]:
        first, *others = (flat_rows(a) for a in arrays)
        of_x, *sums = run(first, mean.reshape(-1), inverse.reshape(-1), scale, *others)
        return of_x.reshape(arrays[0].shape), *(lax.psum(sums, axes) if axes else sums)

    arrays = (mean, inverse, x, of_y, *(() if beside is None else (beside,)))
    run_on_each = on_each_device(local, (P(), *(P(axes) for _ in arrays)), (P(axes), P(), P(), P()))
    return run_on_each(scale.astype(jnp.float32), *arrays)


def flat_rows(x: jax.Array) -> jax.Array:
    """[..., width] as [rows, width]."""
    return x.reshape(-1, x.shape[-1])


def along(vector: jax.Array, x: jax.Array) -> jax.Array:
    """float32 [width] with the leading axes of `x` added."""
    return vector.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + vector.shape)
