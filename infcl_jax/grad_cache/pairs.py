"""Contrastive learning with a learned score of pairs, without holding the activations of all pairs.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache), section 5. Where the
paper stores all scores and their gradients, the log-sum-exps of rows and columns are enough here: memory is linear.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from infcl_jax.grad_cache.chunks import Array, leading_rows, widen
from infcl_jax.ops.pairwise_lse.base import LogSum, accumulation_dtype, finite_shift
from infcl_jax.ops.pairwise_lse.checks import checked_labels

ScoreFn = Callable[[Any, Any, Any], Array]


class PairScores(NamedTuple):
    """What a contrastive loss needs of the scores of all pairs, in at least fp32.

    Attributes:
      row: log-sum-exp of each row's scores over all columns `[bx]`.
      col: log-sum-exp of each column's scores over all rows `[by]`.
      positive: score of each row with its positive `[bx]`.
    """

    row: Array
    col: Array
    positive: Array


def pairwise_scores_lse(
    score_fn: ScoreFn, params: Any, x: Any, y: Any, *, tile: int | tuple[int, int], labels: Array | None = None
) -> PairScores:
    """Row and column log-sum-exps of learned scores, with the activations of one tile of pairs at a time.

    The backward pass computes every tile's scores again. Exact, and differentiable in `params`, `x` and `y`; memory
    beyond one tile is linear in the rows and columns. GradCache, section 5.

    Example:
      >>> def score(params, x, y):  # a small network over all pairs of a tile
      ...     hidden = jnp.tanh((x @ params["x"])[:, None] + (y @ params["y"])[None])
      ...     return hidden @ params["out"]
      >>> scores = pairwise_scores_lse(score, params, query, passage, tile=128)
      >>> loss = (scores.row - scores.positive).mean()

    Args:
      score_fn: pure `score_fn(params, x_rows, y_rows) -> [rows of x, rows of y]` floating scores (logits: any scale is
        its own); a pair's score must not depend on the other pairs. -inf leaves a pair out. What is to be
        differentiated goes through `params`, not through a closure.
      params: pytree of floating arrays.
      x: floating array or pytree with leading axis bx, on one device.
      y: likewise with leading axis by.
      tile: pairs scored at once: rows and columns of a tile, or one number for both.
      labels: int `[bx]`, the column of each row's positive; row i by default.

    Returns:
      `PairScores`.

    Raises:
      ValueError: shapes, dtypes, labels or the tile do not fit.
    """
    sizes = (tile, tile) if isinstance(tile, int) else tuple(tile)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"expected tile to be one or two positive integers, got {tile!r}")
    for leaf in jax.tree.leaves((params, x, y)):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(f"expected params, x and y to be floating, got {jnp.result_type(leaf)}")
    bx, by = leading_rows("x", x), leading_rows("y", y)
    labels = checked_labels(labels, bx, by)
    sizes = (min(sizes[0], bx), min(sizes[1], by))
    score = jax.eval_shape(lambda p, x, y: score_fn(p, _head(x, sizes[0]), _head(y, sizes[1])), params, x, y)
    if score.shape != sizes or not jnp.issubdtype(score.dtype, jnp.floating):
        raise ValueError(f"expected floating scores {list(sizes)} for a tile, got {score.dtype}{list(score.shape)}")
    return _pair_scores(score_fn, sizes, params, x, y, labels)


class _Rows(NamedTuple):
    """One tile's worth of one side; stacked, all tiles of it. `place` is its row number, -1 for padding."""

    place: Array
    values: Any
    label: Array | None = None


class _Weights(NamedTuple):
    """A side's log-sum-exps and their cotangents, tile by tile."""

    log_sum: LogSum
    weight: Array
    positive: Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _pair_scores(score_fn: ScoreFn, sizes: tuple[int, int], params: Any, x: Any, y: Any, labels: Array) -> PairScores:
    return _forward(score_fn, sizes, params, x, y, labels)[0]


def _forward(
    score_fn: ScoreFn, sizes: tuple[int, int], params: Any, x: Any, y: Any, labels: Array
) -> tuple[PairScores, Any]:
    rows, columns = _sides(sizes, x, y, labels)
    score = jax.eval_shape(lambda p, x, y: score_fn(p, _head(x, sizes[0]), _head(y, sizes[1])), params, x, y)
    dtype = accumulation_dtype(score.dtype)

    def row_tile(column_sums: LogSum, row: _Rows) -> tuple[LogSum, tuple[LogSum, Array]]:
        def pair_tile(carry: tuple[LogSum, Array], column: _Rows) -> tuple[tuple[LogSum, Array], LogSum]:
            sums, positive = carry
            scores = _valid(row, column, score_fn(params, row.values, column.values).astype(dtype), -jnp.inf)
            positive = positive + jnp.where(_is_positive(row, column), scores, jnp.zeros_like(scores)).sum(1)
            return (sums.merge(_log_sum(scores, 1)), positive), _log_sum(scores, 0)

        start = (_nothing(row.place.shape, dtype), jnp.zeros(row.place.shape, dtype))
        found, more = lax.scan(pair_tile, start, columns)
        return column_sums.merge(more), found

    column_sums, (row_sums, positive) = lax.scan(row_tile, _nothing(columns.place.shape, dtype), rows)
    bx, by = labels.shape[0], leading_rows("y", y)
    result = PairScores(_flat(row_sums.log(), bx), _flat(column_sums.log(), by), _flat(positive, bx))
    return result, (params, x, y, labels, row_sums, column_sums)


def _backward(score_fn: ScoreFn, sizes: tuple[int, int], saved: Any, cotangents: PairScores) -> tuple:
    params, x, y, labels, row_sums, column_sums = saved
    rows, columns = _sides(sizes, x, y, labels)
    row_weights = _Weights(row_sums, _tiles(cotangents.row, sizes[0]), _tiles(cotangents.positive, sizes[0]))
    column_weights = _Weights(column_sums, _tiles(cotangents.col, sizes[1]))

    def row_tile(carry: tuple, row_side: tuple[_Rows, _Weights]) -> tuple[tuple, Any]:
        d_params, d_columns = carry
        row, of_row = row_side

        def pair_tile(carry: tuple, column_side: tuple[_Rows, _Weights]) -> tuple[tuple, Any]:
            column, of_column = column_side
            scores, pull = jax.vjp(score_fn, params, row.values, column.values)
            wide = scores.astype(of_row.weight.dtype)
            slope = of_row.weight[:, None] * _share(wide, of_row.log_sum, 1)
            slope += of_column.weight[None, :] * _share(wide, of_column.log_sum, 0)
            slope += jnp.where(_is_positive(row, column), of_row.positive[:, None], jnp.zeros_like(slope))
            d_params, d_row, d_column = pull(_valid(row, column, slope, 0).astype(scores.dtype))
            return _add(carry, (d_params, d_row)), widen(d_column)

        start = (d_params, _zeros(row.values))
        (d_params, d_row), more = lax.scan(pair_tile, start, (columns, column_weights))
        return (d_params, _add(d_columns, more)), d_row

    start = (_zeros(params), _zeros(columns.values))
    (d_params, d_y), d_x = lax.scan(row_tile, start, (rows, row_weights))
    d_x, d_y = (jax.tree.map(lambda g, a: _flat(g, a.shape[0]), g, a) for g, a in ((d_x, x), (d_y, y)))
    gradients = jax.tree.map(lambda g, a: g.astype(a.dtype), (d_params, d_x, d_y), (params, x, y))
    return (*gradients, None)


_pair_scores.defvjp(_forward, _backward)


def _sides(sizes: tuple[int, int], x: Any, y: Any, labels: Array) -> tuple[_Rows, _Rows]:
    """Both sides cut into tiles. The last tile is filled up with copies of the last row, which every score accepts."""

    def side(values: Any, size: int, label: Array | None) -> _Rows:
        count = leading_rows("x or y", values)
        place = _tiles(jnp.arange(count, dtype=jnp.int32), size, constant_values=-1)
        filled = jax.tree.map(lambda a: _tiles(a, size, mode="edge"), values)
        return _Rows(place, filled, None if label is None else _tiles(label, size))

    return side(x, sizes[0], labels), side(y, sizes[1], None)


def _tiles(a: Array, size: int, **padding: Any) -> Array:
    """`[b, ...]` to `[tiles, size, ...]`."""
    a = jnp.pad(a, ((0, -a.shape[0] % size),) + ((0, 0),) * (a.ndim - 1), **padding)
    return a.reshape(-1, size, *a.shape[1:])


def _flat(a: Array, count: int) -> Array:
    """The inverse of `_tiles` for b = `count`."""
    return a.reshape(-1, *a.shape[2:])[:count]


def _head(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda a: a[:count], tree)


def _valid(row: _Rows, column: _Rows, values: Array, otherwise: float) -> Array:
    valid = (row.place >= 0)[:, None] & (column.place >= 0)[None, :]
    return jnp.where(valid, values, jnp.full_like(values, otherwise))


def _is_positive(row: _Rows, column: _Rows) -> Array:
    return row.label[:, None] == column.place[None, :]


def _log_sum(scores: Array, axis: int) -> LogSum:
    reference = scores.max(axis)
    terms = jnp.exp(scores - jnp.expand_dims(finite_shift(reference), axis))
    return LogSum(reference, terms.sum(axis))


def _share(scores: Array, log_sum: LogSum, axis: int) -> Array:
    """The softmax of a tile of scores, given the sums over the whole axis."""
    total = jnp.where(log_sum.sumexp > 0, log_sum.sumexp, jnp.ones_like(log_sum.sumexp))
    terms = jnp.exp(scores - jnp.expand_dims(finite_shift(log_sum.shift), axis))
    return terms / jnp.expand_dims(total, axis)


def _nothing(shape: tuple[int, ...], dtype: Any) -> LogSum:
    return LogSum(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))


def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, widen(tree))


def _add(wide: Any, tree: Any) -> Any:
    return jax.tree.map(lambda w, a: w + a.astype(w.dtype), wide, tree)
