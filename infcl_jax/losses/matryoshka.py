"""Losses of several prefixes of the features (Matryoshka representation learning)."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from infcl_jax.losses.base import Loss, LossOutput
from infcl_jax.losses.batch import Array
from infcl_jax.ops.pairwise.base import accumulation_dtype, zero_masked

if TYPE_CHECKING:
    from infcl_jax.models import CLIPOutput


def matryoshka(
    loss: Callable[..., Float[Array, ""]], dims: Sequence[int], weights: Sequence[float] | None = None
) -> Callable[..., Float[Array, ""]]:
    """Sum a loss over L2-normalized prefixes of the features.

    The result is `sum_k weights_k loss(prefix(x, dims_k), prefix(y, dims_k), ...)`, where `prefix` keeps the first
    columns and normalizes each row. Features trained with it can be cut to any of these sizes. Kusupati et al.,
    "Matryoshka Representation Learning" (arXiv:2205.13147), eq. 1, whose weights are 1.

    Each prefix is one call of the loss, so the work is as for features of size `sum(dims)`, and memory stays linear in
    the batch.

    Examples:
      >>> loss = matryoshka(clip_loss, (2, 4))  # features of size 4
      >>> value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(image, text, 14.3)
      >>> print(f"{value:.2f} {clip_loss(image, text, 14.3):.2f}")
      2.65 0.39

    Args:
      loss: function of two arrays of features and of further arguments that returns a floating scalar, such as
        `clip_loss`, `siglip_loss` or `retrieval_loss`.
      dims: increasing sizes of the prefixes. Include the feature size: columns beyond the last prefix get no gradient.
      weights: positive weight of each prefix; None: 1 for each.

    Returns:
      A function of the same arguments as `loss`. It raises `ValueError` for features `[b, D]` with D below the last of
      `dims`, and whenever `loss` does. Rows that `mask` and `passage_mask` exclude may have any values.

    Raises:
      ValueError: `dims` are not increasing positive integers, or `weights` do not fit them.
    """
    dims = checked_dims("dims", dims)
    if not dims:
        raise ValueError("expected dims with at least one size, got none")
    scales = (1.0,) * len(dims) if weights is None else tuple(float(weight) for weight in weights)
    if len(scales) != len(dims) or not all(0 < scale < float("inf") for scale in scales):
        raise ValueError(f"expected one positive weight for each of {len(dims)} dims, got {scales}")

    def matryoshka_loss(x: Any, y: Any, *args: Any, **options: Any) -> Float[Array, ""]:
        mask, y_mask = options.get("mask"), options.get("passage_mask")
        if "passage_mask" not in options:
            y_mask = mask
        prefixes = zip(_prefixes(x, dims, mask), _prefixes(y, dims, y_mask), strict=True)
        values = [_scalar(loss(*pair, *args, **options)) * scale for pair, scale in zip(prefixes, scales, strict=True)]
        return sum(values[1:], values[0])

    return matryoshka_loss


def prefix(features: Float[Array, "b d"], dim: int) -> Float[Array, "b dim"]:
    """Keep the first `dim` columns of features and L2-normalize each row in at least fp32.

    Rows of zeros stay zero. Raises `ValueError` unless the features are [b, D] with D >= `dim`.
    """
    if features.ndim != 2 or not 1 <= dim <= features.shape[1]:
        raise ValueError(f"expected features [b, D] with D >= {dim}, got shape {features.shape}")
    wide = features[:, :dim].astype(accumulation_dtype(features.dtype))
    # Squares of entries beyond 1e18 or below 1e-18 leave the range of fp32. A power of two divides exactly.
    largest = lax.stop_gradient(jnp.abs(wide).max(axis=1, keepdims=True))
    nonzero = largest > 0
    exponent = jnp.clip(jnp.frexp(largest)[1], -100, 100)  # 2^126 and beyond have no normal fp32 reciprocal
    wide = wide / jnp.where(nonzero, jnp.ldexp(jnp.ones_like(largest), exponent), jnp.ones_like(largest))
    squares = jnp.sum(wide * wide, axis=1, keepdims=True)
    norm = lax.rsqrt(jnp.where(nonzero, squares, jnp.ones_like(squares)))
    return (wide * norm).astype(features.dtype)


def checked_dims(name: str, dims: Sequence[int]) -> tuple[int, ...]:
    """Return prefix sizes as a tuple; raise `ValueError` unless they are increasing positive integers."""
    sizes = (dims,) if isinstance(dims, int) else tuple(dims)
    integers = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not integers or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"expected {name} to be increasing positive integers, got {sizes}")
    return sizes


def _prefixes(features: Any, dims: tuple[int, ...], mask: Bool[Array, "b"] | None) -> list[Array]:
    """Normalize all prefixes of the unmasked rows."""
    features = jnp.asarray(features)
    if features.ndim != 2 or features.shape[1] < dims[-1]:
        raise ValueError(f"expected features [b, D] with D >= {dims[-1]}, the last of dims, got shape {features.shape}")
    # A masked NaN would make the gradient of the norm NaN.
    if mask is not None and jnp.shape(mask) == features.shape[:1]:  # the loss raises for a mask of another shape
        features = zero_masked(features, jnp.asarray(mask))
    return [prefix(features, dim) for dim in dims]


def _scalar(value: Any) -> Array:
    if not isinstance(value, jax.Array) or value.shape != ():
        raise ValueError(f"expected a loss that returns a scalar, got {jax.tree.map(jnp.shape, value)}")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatryoshkaLoss(Loss):
    """Training loss summed over prefixes of the features.

    Examples:
      >>> loss = MatryoshkaLoss.wrap(ClipLoss(name="clip", mesh=mesh), (2, 4))
      >>> value = loss(CLIPOutput(image, text, jnp.float32(14.3), logit_bias=None)).value
      >>> print(f"{value:.2f}")
      2.65

    Attributes:
      loss: loss of each prefix, without sample state.
      dims: increasing sizes of the prefixes.

    Raises:
      ValueError: the loss has sample state, or `dims` are wrong.
    """

    loss: Loss
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_dims("matryoshka", self.dims)
        if self.loss.inputs:
            raise ValueError(
                f"expected a loss without sample state with matryoshka, such as clip, got {self.loss.name}"
            )

    @classmethod
    def wrap(cls, loss: Loss, dims: Sequence[int]) -> "MatryoshkaLoss":
        """Sum a training loss over prefixes."""
        settings = {field.name: getattr(loss, field.name) for field in dataclasses.fields(Loss)}
        return cls(**settings, loss=loss, dims=tuple(dims))

    @property
    def implementations(self) -> tuple[str, ...]:  # type: ignore[override]
        """Implementations that the loss of each prefix supports."""
        return tuple(self.loss.implementations)

    @property
    def batch_inputs(self) -> tuple[str, ...]:
        """Keyword arguments of the loss of each prefix."""
        return self.loss.batch_inputs

    def __call__(self, output: "CLIPOutput", **inputs: Any) -> LossOutput:
        """Compute the loss of the model output for the global batch."""

        outputs = []

        def of_prefix(image: Array, text: Array) -> Array:
            outputs.append(self.loss(output._replace(image=image, text=text), **inputs))
            return outputs[-1].value

        value = matryoshka(of_prefix, self.dims)(output.image, output.text)
        whole = outputs[-1]
        return LossOutput(value, extra_positives=whole.extra_positives, distillation=whole.distillation)
