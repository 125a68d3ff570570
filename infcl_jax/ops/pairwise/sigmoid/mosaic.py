"""Kernels of the sigmoid loss for Hopper GPUs: epilogues of the similarity tiles."""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import Pairs, Window
from infcl_jax.ops.pairwise.mosaic import MosaicKernels, SubtileStore, named_operands, subtile_offsets, traced_once
from infcl_jax.ops.pairwise.mosaic_mainloop import run
from infcl_jax.ops.pairwise.mosaic_schedule import SUBTILE, WGMMA_LAYOUT, WorkTile, broadcast, window_offset
from infcl_jax.ops.pairwise.sigmoid.kernel_api import SigmoidOperands, SigmoidWeights
from infcl_jax.ops.pairwise.sigmoid.mosaic_reciprocal import reciprocal
from infcl_jax.ops.pairwise.sigmoid.softplus import LN2, log1p, merge

# Row moments of dS: sum_j dS_ij s_ij and sum_j dS_ij.
MOMENTS = ("scale_moment", "bias_moment")
# Columns of a register tile of the wgmma layout, the narrowest slice.
FOLDED = 8


@dataclasses.dataclass(frozen=True)
class SigmoidMosaic(MosaicKernels):
    """`SigmoidKernels` for Hopper GPUs."""

    @property
    def ranges(self) -> tuple[int, int]:
        """Rows and columns of a range of `Matches`."""
        return SUBTILE, SUBTILE

    @traced_once
    def sums(
        self, operands: SigmoidOperands, window: Window, pairs: Pairs
    ) -> tuple[Float32[Array, "{window.rows}"], Float32[Array, "{window.rows}"] | None]:
        """Implement `Kernels.sums`."""
        schedule = self.schedule(self.forward, window, operands.x, pairs)
        has_positives = operands.matches is not None
        names = ["negative"] + ["positive"] * has_positives

        def epilogue(work: WorkTile, s: Array, rows: list[Array], carry: tuple) -> tuple:
            for i, row_bias in zip(subtile_offsets(schedule.tiles.rows), rows, strict=True):
                sums: list[_Terms] = []
                for j in subtile_offsets(schedule.tiles.columns):
                    logits = _logits(work, s, i, j, row_bias)
                    if has_positives:
                        terms = lax.cond(
                            _may_match(work, i, j),
                            functools.partial(_split_terms, work, i, j),
                            lambda logits: (_terms(logits), _no_terms()),
                            logits,
                        )
                    else:
                        terms = (_terms(logits),)
                    sums = [_add(a, b) for a, b in zip(sums, terms, strict=True)] if sums else list(terms)
                for name, summed in zip(names, sums, strict=True):
                    work.refs[name][work.column_tile, pl.ds(work.row + i, SUBTILE)] = _row_sum(summed)
            return carry

        shape = jax.ShapeDtypeStruct((schedule.column_tiles, window.rows), jnp.float32)
        partials = run(
            schedule,
            _named_operands(operands, window),
            dict.fromkeys(names, shape),
            init=lambda work: (),
            prefetch=lambda work: [work.load_rows("row_bias", i) for i in subtile_offsets(schedule.tiles.rows)],
            epilogue=epilogue,
            finalize=lambda work, carry: None,
        )
        return partials["negative"].sum(0), partials["positive"].sum(0) if has_positives else None

    @traced_once
    def ds(
        self,
        operands: SigmoidOperands,
        weights: SigmoidWeights,
        window: Window,
        pairs: Pairs,
        *,
        terms: int,
        moments: bool,
    ) -> tuple[BFloat16[Array, "{window.rows} {terms*window.columns}"], Float32[Array, "{window.rows} 2"] | None, None]:
        """Implement `Kernels.ds`."""
        tiles = self.backward_tiles(operands.x, pairs)
        schedule = self.schedule(tiles, window, operands.x, pairs)
        has_positives = operands.matches is not None

        def epilogue(work: WorkTile, s: Array, rows: list[tuple], carry: tuple) -> tuple:
            store = SubtileStore(work, terms)
            for i, (row_bias, row_inverse) in zip(subtile_offsets(tiles.rows), rows, strict=True):
                inverse, folded = broadcast(row_inverse, 0), []
                for j in subtile_offsets(tiles.columns):
                    logit = _logits(work, s, i, j, row_bias)
                    ds = _weighted_sigmoid(logit, inverse)
                    if has_positives:
                        ds = lax.cond(
                            _may_match(work, i, j),
                            functools.partial(_with_positives, work, i, j),
                            lambda ds, logit: ds,
                            *(ds, logit),
                        )
                    if moments:
                        s_ij = s[i : i + SUBTILE, j : j + SUBTILE]
                        folded.append((_fold(operator.add, ds * s_ij), _fold(operator.add, ds)))
                    store(ds, i, j)
                if moments:
                    for name, subtiles in zip(MOMENTS, zip(*folded, strict=True), strict=True):
                        moment = functools.reduce(operator.add, subtiles).sum(1)
                        work.refs[name][work.column_tile, pl.ds(work.row + i, SUBTILE)] = moment
            return carry

        def prefetch(work: WorkTile) -> list[tuple]:
            names = ("row_bias", "negative_inverse")
            return [tuple(work.load_rows(name, i) for name in names) for i in subtile_offsets(tiles.rows)]

        results = {"ds": jax.ShapeDtypeStruct((window.rows, terms * window.columns), jnp.bfloat16)}
        if moments:
            shape = jax.ShapeDtypeStruct((schedule.column_tiles, window.rows), jnp.float32)
            results |= dict.fromkeys(MOMENTS, shape)
        named = _named_operands(operands, window)
        named |= {f"{name}_inverse": _inverse(w) for name, w in weights._asdict().items() if w is not None}
        out = run(
            schedule,
            named,
            results,
            init=lambda work: (),
            prefetch=prefetch,
            epilogue=epilogue,
            finalize=lambda work, carry: None,
        )
        if not moments:
            return out["ds"], None, None
        return out["ds"], jnp.stack([out[name].sum(0) for name in MOMENTS], axis=1), None


def _named_operands(operands: SigmoidOperands, window: Window) -> dict[str, Array]:
    """Return kernel operands by name."""
    named = named_operands(operands._replace(matches=None), window)
    if operands.matches is not None:
        named |= {f"match_{name}": a for name, a in operands.matches._asdict().items()}
    return named


def _logits(work: WorkTile, s: Array, i: int, j: int, row_bias: Array) -> Array:
    """Compute the logits of the subtile at `[i, j]`, in base 2."""
    bias = broadcast(row_bias, 0)
    if "column_bias" in work.refs:  # columns are masked or padding
        bias = bias + broadcast(work.load_columns("column_bias", j), 1)
    return s[i : i + SUBTILE, j : j + SUBTILE] * work.refs["scale"][0] + bias


def _may_match(work: WorkTile, i: int, j: int) -> Array:
    """Return whether the subtile at `[i, j]` may have positives."""
    refs = work.refs
    row = lax.div(window_offset(refs, 0) + work.row + i, SUBTILE)
    column = lax.div(window_offset(refs, 1) + work.column + j, SUBTILE)
    return (refs["match_row_lowest"][row] <= refs["match_column_highest"][column]) & (
        refs["match_row_highest"][row] >= refs["match_column_lowest"][column]
    )


def _matches(work: WorkTile, i: int, j: int) -> Array:
    """Return bool `[SUBTILE, SUBTILE]`, True at the positives of the subtile at `[i, j]`."""
    return broadcast(work.load_rows("match_row", i), 0) == broadcast(work.load_columns("match_column", j), 1)


class _Terms(NamedTuple):
    """Partial sum of softplus, `linear * ln(2) + log1p(u)`: fp32 `[SUBTILE, FOLDED]` each, see `softplus`."""

    linear: Array
    u: Array


def _terms(z: Array) -> _Terms:
    """Sum softplus of a subtile's logits over columns that are in the registers of one thread."""
    positive = jnp.maximum(z, 0.0)
    return _Terms(_fold(operator.add, positive), _fold(merge, jnp.exp2(z - 2.0 * positive)))


def _split_terms(work: WorkTile, i: int, j: int, z: Array) -> tuple[_Terms, _Terms]:
    """Compute the terms of the negatives and of the positives in the subtile at `[i, j]`."""
    match, excluded = _matches(work, i, j), jnp.full_like(z, -jnp.inf)
    return _terms(jnp.where(match, excluded, z)), _terms(jnp.where(match, -z, excluded))


def _no_terms() -> _Terms:
    zeros = plgpu.layout_cast(jnp.zeros((SUBTILE, FOLDED), jnp.float32), WGMMA_LAYOUT)
    return _Terms(zeros, zeros)


def _add(a: _Terms, b: _Terms) -> _Terms:
    """Add partial sums. The logarithm of a product of several 1 + u replaces one logarithm per pair."""
    return _Terms(a.linear + b.linear, merge(a.u, b.u))


def _row_sum(terms: _Terms) -> Array:
    """Compute row sums in nats."""
    return (LN2 * terms.linear + log1p(terms.u)).sum(1)


def _fold(combine: Any, subtile: Array) -> Array:
    """Combine the columns of a subtile elementwise to `[SUBTILE, FOLDED]`.

    All operands of an element are in the registers of one thread.
    """
    while subtile.shape[1] > FOLDED:
        middle = subtile.shape[1] // 2
        subtile = combine(subtile[:, :middle], subtile[:, middle:])
    return subtile


def _inverse(weight: Array) -> Array:
    """Return 1 / weight; for 0 the largest number, whose `reciprocal` is 0 again."""
    largest = jnp.finfo(weight.dtype).max
    return jnp.clip(1.0 / weight, -largest, largest)


def _weighted_sigmoid(z: Array, inverse: Array) -> Array:
    """Compute weight / (1 + 2^-z) with full relative precision; 0 for -inf. `inverse` is 1 / weight."""
    return reciprocal(jnp.exp2(-z) * inverse + inverse)


def _with_positives(work: WorkTile, i: int, j: int, ds: Array, z: Array) -> Array:
    """Overwrite dS of the positives of a subtile.

    In fp32, and without the cancellation of sigmoid(z) - 1.
    """
    inverse = broadcast(work.load_rows("positive_inverse", i), 0)
    return jnp.where(_matches(work, i, j), _weighted_sigmoid(-z, inverse), ds)


KERNELS = SigmoidMosaic
