"""Log-sum-exps of learned pair scores, computed tile by tile.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache), section 5. The paper
stores all scores and their gradients. This implementation stores only row and column log-sum-exps, so memory is linear
in the batch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Integer, PyTree

from infcl_jax.grad_cache.chunks import Array, leading_rows, widen
from infcl_jax.ops.pairwise.base import LogSum, accumulation_dtype, exp_below, finite_shift
from infcl_jax.ops.pairwise.checks import checked_labels

ScoreFn = Callable[[Any, Any, Any], Float[Array, "bx by"]]


class PairScores(NamedTuple):
    """Row and column log-sum-exps and positive scores, in at least fp32.

    Examples:
      >>> scores = pairwise_scores_lse(lambda params, x, y: params * x @ y.T, jnp.float32(9), image, text, tile=4)
      >>> scores.row.shape, scores.col.shape, scores.positive.shape
      ((8,), (8,), (8,))

    Attributes:
      row: log-sum-exp of each row over all columns, `[bx]`.
      col: log-sum-exp of each column over all rows, `[by]`.
      positive: score of each row's positive pair, `[bx]`.
    """

    row: Float[Array, "bx"]
    col: Float[Array, "by"]
    positive: Float[Array, "bx"]


def pairwise_scores_lse(
    score_fn: ScoreFn,
    params: PyTree[Float[Array, "..."]],
    x: PyTree[Float[Array, "bx ..."]],
    y: PyTree[Float[Array, "by ..."]],
    *,
    tile: int | tuple[int, int],
    labels: Integer[Array, "bx"] | None = None,
) -> PairScores:
    """Row and column log-sum-exps of learned pair scores.

    Memory holds the activations of one tile of pairs at a time, since the backward pass recomputes every tile. Further
    memory is linear in rows and columns. The result is exact and differentiable in `params`, `x` and `y`.

    Source: GradCache, section 5.

    Examples:
      >>> def score(params, x, y):  # a small network over all pairs of a tile
      ...     hidden = jnp.tanh((x @ params["x"])[:, None] + (y @ params["y"])[None])
      ...     return hidden @ params["out"]
      >>> params = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 3)), "out": jnp.ones(3)}
      >>> scores = pairwise_scores_lse(score, params, image, text, tile=4)
      >>> loss = (scores.row - scores.positive).mean()

    Args:
      score_fn: pure function `score_fn(params, x_rows, y_rows) -> scores`. The scores are floating logits
        `[rows of x, rows of y]` with any scale applied. A pair's score must not depend on other pairs; -inf excludes a
        pair. Gradients reach `params`, `x` and `y` only, not values in a closure.
      params: pytree of floating arrays.
      x: pytree of floating arrays `[bx, ...]` on one device.
      y: pytree of floating arrays `[by, ...]` on one device.
      tile: rows and columns of a tile, or one number for both.
      labels: int `[bx]`, column of each row's positive pair; None for column i of row i.

    Returns:
      `PairScores` of all pairs.

    Raises:
      ValueError: shapes, dtypes, labels or the tile size do not match.
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


class _TileRows(NamedTuple):
    """Rows of one tile of x or y, or stacked rows of all tiles."""

    indices: Array  # of each row in x or y, -1 for padding
    values: Any
    label: Array | None = None  # for x, index in y of each row's positive


class _LseCotangents(NamedTuple):
    """Log-sum-exps of rows or columns and their cotangents, by tile."""

    log_sum: LogSum
    d_lse: Array
    d_positive: Array | None = None  # for rows, of the positive scores


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _pair_scores(score_fn: ScoreFn, sizes: tuple[int, int], params: Any, x: Any, y: Any, labels: Array) -> PairScores:
    return _forward(score_fn, sizes, params, x, y, labels)[0]


def _forward(
    score_fn: ScoreFn, sizes: tuple[int, int], params: Any, x: Any, y: Any, labels: Array
) -> tuple[PairScores, Any]:
    rows, columns = _sides(sizes, x, y, labels)
    score = jax.eval_shape(lambda p, x, y: score_fn(p, _head(x, sizes[0]), _head(y, sizes[1])), params, x, y)
    dtype = accumulation_dtype(score.dtype)

    def row_tile(column_sums: LogSum, row: _TileRows) -> tuple[LogSum, tuple[LogSum, Array]]:
        def pair_tile(carry: tuple[LogSum, Array], column: _TileRows) -> tuple[tuple[LogSum, Array], LogSum]:
            sums, positive = carry
            scores = _mask_padding(row, column, score_fn(params, row.values, column.values).astype(dtype), -jnp.inf)
            positive = positive + jnp.where(_is_positive(row, column), scores, jnp.zeros_like(scores)).sum(1)
            return (sums.merge(_log_sum(scores, 1)), positive), _log_sum(scores, 0)

        start = (_empty_log_sum(row.indices.shape, dtype), jnp.zeros(row.indices.shape, dtype))
        row_result, tile_sums = lax.scan(pair_tile, start, columns)
        return column_sums.merge(tile_sums), row_result

    column_sums, (row_sums, positive) = lax.scan(row_tile, _empty_log_sum(columns.indices.shape, dtype), rows)
    bx, by = labels.shape[0], leading_rows("y", y)
    result = PairScores(_flat(row_sums.log(), bx), _flat(column_sums.log(), by), _flat(positive, bx))
    return result, (params, x, y, labels, row_sums, column_sums)


def _backward(score_fn: ScoreFn, sizes: tuple[int, int], saved: Any, cotangents: PairScores) -> tuple:
    params, x, y, labels, row_sums, column_sums = saved
    rows, columns = _sides(sizes, x, y, labels)
    row_cotangents = _LseCotangents(row_sums, _tiles(cotangents.row, sizes[0]), _tiles(cotangents.positive, sizes[0]))
    column_cotangents = _LseCotangents(column_sums, _tiles(cotangents.col, sizes[1]))

    def row_tile(carry: tuple, row_inputs: tuple[_TileRows, _LseCotangents]) -> tuple[tuple, Any]:
        d_params, d_columns = carry
        row, row_cotangent = row_inputs

        def pair_tile(carry: tuple, column_inputs: tuple[_TileRows, _LseCotangents]) -> tuple[tuple, Any]:
            column, column_cotangent = column_inputs
            scores, pullback = jax.vjp(score_fn, params, row.values, column.values)
            wide = scores.astype(row_cotangent.d_lse.dtype)
            d_scores = row_cotangent.d_lse[:, None] * _softmax(wide, row_cotangent.log_sum, 1)
            d_scores += column_cotangent.d_lse[None, :] * _softmax(wide, column_cotangent.log_sum, 0)
            d_scores += jnp.where(
                _is_positive(row, column), row_cotangent.d_positive[:, None], jnp.zeros_like(d_scores)
            )
            d_params, d_row, d_column = pullback(_mask_padding(row, column, d_scores, 0).astype(scores.dtype))
            return _add(carry, (d_params, d_row)), widen(d_column)

        start = (d_params, _zeros(row.values))
        (d_params, d_row), d_tile = lax.scan(pair_tile, start, (columns, column_cotangents))
        return (d_params, _add(d_columns, d_tile)), d_row

    start = (_zeros(params), _zeros(columns.values))
    (d_params, d_y), d_x = lax.scan(row_tile, start, (rows, row_cotangents))
    d_x, d_y = (jax.tree.map(lambda g, a: _flat(g, a.shape[0]), g, a) for g, a in ((d_x, x), (d_y, y)))
    gradients = jax.tree.map(lambda g, a: g.astype(a.dtype), (d_params, d_x, d_y), (params, x, y))
    return (*gradients, None)


_pair_scores.defvjp(_forward, _backward)


def _sides(sizes: tuple[int, int], x: Any, y: Any, labels: Array) -> tuple[_TileRows, _TileRows]:
    """Split x (the rows) and y (the columns) into tiles.

    The last tile is padded with copies of the last row, which are valid inputs of any score function.
    """

    def side(values: Any, size: int, label: Array | None) -> _TileRows:
        count = leading_rows("x or y", values)
        indices = _tiles(jnp.arange(count, dtype=jnp.int32), size, constant_values=-1)
        padded = jax.tree.map(lambda a: _tiles(a, size, mode="edge"), values)
        return _TileRows(indices, padded, None if label is None else _tiles(label, size))

    return side(x, sizes[0], labels), side(y, sizes[1], None)


def _tiles(a: Array, size: int, **padding: Any) -> Array:
    """Pad and reshape `[b, ...]` to `[tiles, size, ...]`."""
    a = jnp.pad(a, ((0, -a.shape[0] % size),) + ((0, 0),) * (a.ndim - 1), **padding)
    return a.reshape(-1, size, *a.shape[1:])


def _flat(a: Array, count: int) -> Array:
    """Reshape `[tiles, size, ...]` to `[count, ...]` without padding."""
    return a.reshape(-1, *a.shape[2:])[:count]


def _head(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda a: a[:count], tree)


def _mask_padding(row: _TileRows, column: _TileRows, values: Array, fill_value: float) -> Array:
    """Replace the values of pairs that include padding."""
    valid = (row.indices >= 0)[:, None] & (column.indices >= 0)[None, :]
    return jnp.where(valid, values, jnp.full_like(values, fill_value))


def _is_positive(row: _TileRows, column: _TileRows) -> Array:
    return row.label[:, None] == column.indices[None, :]


def _log_sum(scores: Array, axis: int) -> LogSum:
    max_score = scores.max(axis)
    terms = exp_below(scores, jnp.expand_dims(finite_shift(max_score), axis))
    return LogSum(max_score, terms.sum(axis))


def _softmax(scores: Array, log_sum: LogSum, axis: int) -> Array:
    """Softmax of one tile along `axis`, normalized over all tiles."""
    normalizer = jnp.where(log_sum.sumexp > 0, log_sum.sumexp, jnp.ones_like(log_sum.sumexp))
    terms = exp_below(scores, jnp.expand_dims(finite_shift(log_sum.shift), axis))
    return terms / jnp.expand_dims(normalizer, axis)


def _empty_log_sum(shape: tuple[int, ...], dtype: Any) -> LogSum:
    return LogSum(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))


def _zeros(tree: Any) -> Any:
    """Zero accumulators, in at least fp32."""
    return jax.tree.map(jnp.zeros_like, widen(tree))


def _add(wide: Any, tree: Any) -> Any:
    """Accumulate `tree` in the dtypes of `wide`."""
    return jax.tree.map(lambda w, a: w + a.astype(w.dtype), wide, tree)
