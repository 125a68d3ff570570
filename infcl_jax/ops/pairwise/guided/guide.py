"""Guide: a model whose similarities leave false negatives out of the sums of `pairwise_lse`."""

import dataclasses
import math
import numbers
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.ops.pairwise.base import Array, zero_masked
from infcl_jax.ops.pairwise.checks import check_features

MARGIN_STRATEGIES = ("absolute", "relative")


@dataclasses.dataclass(frozen=True)
class Margin:
    """Distance of a negative's similarity in the guide from that of the own pair.

    Attributes:
      value: the margin; negative to keep negatives that are more similar than the own pair.
      strategy: "absolute", or "relative" to the absolute similarity of the own pair.

    Raises:
      ValueError: the value is not a finite number, or the strategy is unknown.
    """

    value: float = 0.0
    strategy: str = "absolute"

    def __post_init__(self) -> None:
        check_choice("margin_strategy", self.strategy, MARGIN_STRATEGIES)
        if not isinstance(self.value, numbers.Real) or not math.isfinite(self.value):
            raise ValueError(f"expected margin to be a finite number, got {self.value!r}")

    def thresholds(self, own: Float[Array, "n"]) -> Float[Array, "n"]:
        """Return the largest similarity of a negative in each sum, from the similarities `own` of the own pairs."""
        return own - float(self.value) * (jnp.abs(own) if self.strategy == "relative" else jnp.ones_like(own))


def checked_margin(guide: Any, margin: float, strategy: str, rows: int, columns: int) -> Margin:
    """Return the margin of a guide; the default without one.

    Raises:
      ValueError: the guide does not have features of all rows and columns, or there is a margin but no guide.
    """
    checked = Margin(margin, strategy)
    if guide is None:
        if checked != Margin():
            raise ValueError(f"expected a guide with margin={margin!r} and margin_strategy={strategy!r}, got None")
        return checked
    if not isinstance(guide, tuple | list) or len(guide) != 2:
        raise ValueError(f"expected guide to be features of the rows and of the columns, got {type(guide).__name__}")
    x, y = guide
    check_features(x, y)
    if (len(x), len(y)) != (rows, columns):
        raise ValueError(f"expected a guide of {rows} rows and {columns} columns, got {len(x)} and {len(y)}")
    return checked


def guide_features(features: Array, mask: Bool[Array, "n"] | None) -> Array:
    """Return the guide's features for a block: without gradient, 0 in masked rows, and in fp32 instead of fp16."""
    features = zero_masked(lax.stop_gradient(jnp.asarray(features)), mask)
    return features.astype(jnp.float32) if features.dtype == jnp.float16 else features
