"""Guide: a second model. Pairs that it finds too similar to be negatives are left out of the sums."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from infcl_jax.ops.common.checks import check_choice
from infcl_jax.ops.pairwise.base import Array, similarities, zero_masked
from infcl_jax.ops.pairwise.checks import check_features

MARGIN_STRATEGIES = ("absolute", "relative")


@dataclasses.dataclass(frozen=True)
class Margin:
    """How much less similar than the own pair a negative must be in the guide.

    Attributes:
      value: the margin.
      strategy: "absolute", or "relative" to the absolute similarity of the own pair.
    """

    value: float = 0.0
    strategy: str = "absolute"

    def __post_init__(self) -> None:
        """Raise `ValueError` for a value or strategy that is not as described."""
        check_choice("margin_strategy", self.strategy, MARGIN_STRATEGIES)
        if not isinstance(self.value, int | float) or not math.isfinite(self.value):
            raise ValueError(f"expected margin as a finite Python number, got {self.value!r}")

    def thresholds(self, own: Float[Array, "n"]) -> Float[Array, "n"]:
        """Return the highest similarities at which negatives are kept, given the own pairs'."""
        return own - self.value * (jnp.abs(own) if self.strategy == "relative" else jnp.ones_like(own))


NO_MARGIN = Margin()


def check_guide(guide: Any, margin: Margin, rows: int, columns: int) -> None:
    """Raise `ValueError` unless the guide has features of all rows and columns, or there is no guide and no margin."""
    if guide is None:
        if margin != NO_MARGIN:
            raise ValueError(f"expected a guide with the margin {margin.value} and {margin.strategy!r}, got none")
        return
    if not isinstance(guide, tuple | list) or len(guide) != 2:
        raise ValueError(f"expected guide as features of the rows and of the columns, got {type(guide).__name__}")
    check_features(*guide)
    if (len(guide[0]), len(guide[1])) != (rows, columns):
        raise ValueError(
            f"expected guide features of {rows} rows and {columns} columns, got {len(guide[0])} and {len(guide[1])}"
        )


def guided_pairs(
    x: Float[Array, "rows dg"] | None,
    y: Float[Array, "by dg"] | None,
    x_threshold: Float[Array, "rows"] | None,
    y_threshold: Float[Array, "by"] | None,
) -> tuple[Bool[Array, "rows by"] | None, Bool[Array, "rows by"] | None]:
    """Return masks of the pairs that the guide keeps in row and in column sums; None: all pairs, or no such sums."""
    if x is None or y is None or x_threshold is None:
        return None, None
    t = similarities(x, y)
    return t <= x_threshold[:, None], None if y_threshold is None else t <= y_threshold[None, :]


def guide_features(features: Array, mask: Bool[Array, "n"] | None) -> Array:
    """Return the guide's features as backends take them: without gradient, masked rows zero, fp16 as fp32."""
    features = zero_masked(lax.stop_gradient(features), mask)
    return features.astype(jnp.float32) if features.dtype == jnp.float16 else features
