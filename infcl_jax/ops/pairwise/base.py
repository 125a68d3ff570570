"""Contract between communication strategies (ring, all-gather), compute backends and losses.

A backend computes one `Block` on one device, without a mesh or collectives. A strategy moves blocks between devices,
without kernels. A loss defines the named tuples that they exchange: blocks, sums, cotangents and gradients.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int32, Shaped

Array = jax.Array
AxisName = str | tuple[str, ...]
FP32_BYTES = 4


class LogSum(NamedTuple):
    """Log-sum-exp as the pair (shift, sumexp): `lse = shift + log(sumexp)`.

    The pair keeps full precision. At scale 100 an fp32 `lse` is rounded to 8e-6. The probability of a well-aligned pair
    differs from one by less, so the rounding would hide its gradient. An empty sum is (-inf, 0).
    """

    shift: Float[Array, "..."]
    sumexp: Float[Array, "..."]

    def log(self) -> Float[Array, "..."]:
        """Return the log-sum-exp; -inf for an empty sum."""
        return self.shift + jnp.log(self.sumexp)

    def merge(self, other: "LogSum") -> "LogSum":
        """Return the log-sum-exp over both sets of terms."""
        shift = jnp.maximum(self.shift, other.shift)
        finite = finite_shift(shift)
        sumexp = self.sumexp * exp_below(self.shift, finite) + other.sumexp * exp_below(other.shift, finite)
        return LogSum(shift, sumexp)


def finite_shift(shift: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Replace -inf, the shift of an empty sum, by 0.

    The result can be subtracted from exponents without NaN.
    """
    return jnp.where(jnp.isneginf(shift), jnp.zeros_like(shift), shift)


@jax.custom_jvp
def exp_below(z: Float[Array, "..."], shift: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `exp(z - shift)` for logits of at most `shift`.

    The result is 1 at the maximum, whatever its size. XLA contracts a product and a difference to one fused operation,
    `scale * s - shift`, which does not round the product. At logits of 1e10 its difference from the rounded maximum is
    hundreds, so that the exponential would overflow or vanish.
    """
    return jnp.where(z >= shift, jnp.ones_like(z), jnp.exp(z - shift))


exp_below.defjvps(lambda dz, e, z, shift: e * dz, lambda d_shift, e, z, shift: -e * d_shift)


def empty_log_sum(like: Float[Array, "..."]) -> LogSum:
    """Return empty log-sum-exps shaped like `like`.

    They vary over the same mesh axes as `like`.
    """
    zeros = constant(like.shape, 0, like.dtype, varying_like=like)
    return LogSum(zeros - jnp.inf, zeros)


class Block(Protocol):
    """Rows and columns that a backend compares in one call: a named tuple of arrays, marked by `columns`.

    Its first fields are those of its gradients, which begin with `x` and `y`: the features of the rows `[bx, D]` and of
    the columns `[by, D]`.
    """

    x: Array
    y: Array

    def with_columns(self, columns: tuple, first: int | None) -> Self:
        """Return this device's rows with other columns.

        Args:
          columns: values of the fields that belong to the columns, which rotate.
          first: index of the first of these columns on this device; None if another device owns them.
        """


class Backend(Protocol):
    """Computation of one block of any size on one device.

    Sums, cotangents and gradients are named tuples, marked by `columns`. A gradient that
    is not needed is None. Accumulators of row features may be any pytree that the backend chooses. The first axis of
    those of the columns is the columns, optionally padded at the end.
    """

    def forward(self, block: Any) -> Any:
        """Compute the sums of a block. Those of masked rows or columns are arbitrary but never NaN."""

    def accumulators(self, block: Any, needs_grad: Any, dtype: jnp.dtype) -> Any:
        """Return zero accumulators, with `dtype` for the features'.

        `needs_grad` has the type of the gradients, with static flags.
        """

    def backward(self, block: Any, cotangents: Any, acc: Any) -> Any:
        """Add the block's gradients to `acc`, in place where that saves memory.

        Masked rows and columns contribute nothing. Cotangents are scaled so that the largest is between 1/2 and 1.
        """

    def gradient(self, block: Any, cotangents: Any, acc: Any, needs_grad: Any) -> Any:
        """Convert complete accumulators into gradients.

        Only the sum over all devices of a gradient of a scalar is defined. The share of one device is arbitrary.
        """


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Communication strategy with a hand-written gradient.

    Attributes:
      forward: function with the arguments and results of `ring.forward`.
      backward: function with the arguments and results of `ring.backward`.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def columns[T: type](*names: str) -> Callable[[T], T]:
    """Return a decorator of named tuples, which states the fields that belong to the columns of a block."""

    def mark(fields: T) -> T:
        setattr(fields, "COLUMNS", names)  # noqa: B010 - mypy knows no such attribute
        return fields

    return mark


def split_columns(fields: Any) -> tuple[Any, tuple]:
    """Return a named tuple with None for its column fields, and the values of these fields."""
    return fields._replace(**dict.fromkeys(fields.COLUMNS)), tuple(getattr(fields, name) for name in fields.COLUMNS)


def join_columns(fields: Any, columns: tuple) -> Any:
    """Invert `split_columns`."""
    return fields._replace(**dict(zip(fields.COLUMNS, columns, strict=True)))


def zero_gradients(block: Any, needs_grad: Any, dtype: jnp.dtype) -> Any:
    """Return zeros for every needed gradient of a block, with `dtype` for the features'."""

    def zeros(like: Array | None, needed: bool, dtype: jnp.dtype) -> Array | None:
        return constant(like.shape, 0, dtype, varying_like=block.x) if needed and like is not None else None

    scalar_dtype = accumulation_dtype(block.x.dtype)
    fields = zip(needs_grad._fields, block, needs_grad, strict=False)
    return type(needs_grad)(
        *(zeros(a, needed, dtype if name in ("x", "y") else scalar_dtype) for name, a, needed in fields)
    )


def zero_masked(array: Shaped[Array, "n *rest"], mask: Bool[Array, "n"] | None) -> Shaped[Array, "n *rest"]:
    """Set the masked rows of `array` `[n, ...]` to zero.

    `mask` is bool `[n]`, False for masked rows; None leaves `array` unchanged.
    """
    if mask is None:
        return array
    return jnp.where(jnp.expand_dims(mask, range(1, array.ndim)), array, jnp.zeros_like(array))


def add_trees(a: Any, b: Any) -> Any:
    """Add two pytrees leaf by leaf, in the dtypes of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), a, b)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return fp64 for fp64 features, else fp32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def similarities(x: Float[Array, "bx d"], y: Float[Array, "by d"]) -> Float[Array, "bx by"]:
    """Compute all `<x_i, y_j>` `[bx, by]`, never in TF32.

    The result is in the accumulation dtype.
    """
    return matmul(x, y, contract=(1, 1))


def matmul(a: Float[Array, "_ _"], b: Float[Array, "_ _"], contract: tuple[int, int]) -> Float[Array, "_ _"]:
    """Contract one axis of each operand, in the accumulation dtype.

    `contract` holds the axes of `a` and `b`. fp32 operands are never rounded to TF32.
    """
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
        preferred_element_type=accumulation_dtype(a.dtype),
    )


def as_varying(array: Array, axes: frozenset[str]) -> Array:
    """Mark `array` as varying over the mesh axes `axes`.

    JAX then sums its gradient over these axes.
    """
    missing = tuple(axes - jax.typeof(array).manual_axis_type.varying)
    return lax.pcast(array, missing, to="varying") if missing else array


def varying_over(tree: Any, axis_name: AxisName | None) -> Any:
    """Apply `as_varying` to a pytree, over `axis_name` and all axes over which one of its arrays varies.

    A gradient rule returns one type for all of them, also for a replicated scale.
    """
    axes = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    every = frozenset(axes).union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(tree)))
    return jax.tree.map(lambda a: as_varying(a, every), tree)


def constant(shape: tuple[int, ...], value: float, dtype: Any, varying_like: Array) -> Array:
    """Create a constant array that varies over the axes of `varying_like`."""
    return as_varying(jnp.full(shape, value, dtype), jax.typeof(varying_like).manual_axis_type.varying)


def zero_after(done: Any) -> Int32[Array, ""]:
    """Return int32 0 with a data dependency on the arrays of `done`.

    XLA removes optimization barriers before it schedules, so only a data dependency fixes an order. XLA does not
    simplify the minimum of absolute values and 0.
    """
    first = [jnp.abs(a[(0,) * a.ndim]).astype(jnp.float32) for a in jax.tree.leaves(done)]
    return jnp.minimum(sum(first, jnp.float32(0)), 0).astype(jnp.int32)


def round_up(count: int, multiple: int) -> int:
    """Round `count` up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


def accumulator_bytes(rows: int, width: int) -> int:
    """Bytes of the fp32 gradients of `rows` rows and `rows` columns."""
    return 2 * rows * width * FP32_BYTES


def similarity_bytes(rows: int, columns: int) -> int:
    """Bytes of the fp32 similarities of a block and of dS."""
    return 2 * rows * columns * FP32_BYTES
