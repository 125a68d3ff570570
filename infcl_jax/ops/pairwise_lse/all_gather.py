"""The strategies that gather features instead of passing them on: what CLIP, OpenCLIP and DisCo-CLIP do.

Kept as exact, comparable implementations of the same primitive; `ring.py` needs far less memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from infcl_jax.ops.pairwise_lse.base import (
    Array,
    AxisName,
    Backend,
    Block,
    Cotangents,
    Gradient,
    Sums,
    Wanted,
    accumulation_dtype,
    empty_log_sum,
)
from infcl_jax.ops.pairwise_lse.dense import dense_lse


def dense(
    block: Block, *, axis_name: AxisName | None, exclude: bool, columns: bool
) -> tuple[Array, Array | None, Array]:
    """CLIP: both sides gathered everywhere, the whole `[b, b]` matrix on every device.

    Args:
      block: this device's rows and columns; labels index into its own columns.
      axis_name: mesh axis to gather over, None for one device.
      exclude: leave positives out of the sums.
      columns: whether column sums are asked for (None is returned otherwise).

    Returns:
      Row log-sum-exp `[bx]`, column log-sum-exp `[by]` and positives `[bx]` of this device's part.
    """
    if axis_name is None:
        return dense_lse(block, exclude=exclude, columns=columns)
    row, column, positive = dense_lse(_gather_all(block, axis_name), exclude=exclude, columns=columns)
    own = lax.axis_index(axis_name)
    x_rows, y_rows = block.x.shape[0], block.y.shape[0]
    return (
        lax.dynamic_slice_in_dim(row, own * x_rows, x_rows),
        lax.dynamic_slice_in_dim(column, own * y_rows, y_rows) if columns else None,
        lax.dynamic_slice_in_dim(positive, own * x_rows, x_rows),
    )


def local(
    block: Block, *, axis_name: AxisName | None, exclude: bool, columns: bool
) -> tuple[Array, Array | None, Array]:
    """OpenCLIP's local loss: both sides gathered, each device compares its own rows and its own columns with all.

    Arguments and results as `dense`.
    """
    if axis_name is None:
        return dense_lse(block, exclude=exclude, columns=columns)
    row, _, positive = dense_lse(_all_columns(block, axis_name), exclude=exclude, columns=False)
    if not columns:
        return row, None, positive
    _, column, all_positives = dense_lse(_all_rows(block, axis_name), exclude=exclude)
    # Half of each positive from either product: its gradient then cancels with that product's sums before rounding.
    rows = block.x.shape[0]
    positive_again = lax.dynamic_slice_in_dim(all_positives, lax.axis_index(axis_name) * rows, rows)
    return row, column, (positive + positive_again) / 2


def disco_forward(backend: Backend, block: Block, *, axis_name: AxisName | None, exclude: bool, columns: bool) -> Sums:
    """DisCo-CLIP: compares as `local`, keeps nothing. Chen et al., "DisCo-CLIP", section 3.

    Arguments and results as `ring.forward`.
    """
    if axis_name is None:
        return backend.forward(block, exclude=exclude, columns=columns)
    sums = backend.forward(_all_columns(block, axis_name), exclude=exclude, columns=False)
    if not columns:
        return sums
    return sums._replace(column=backend.forward(_all_rows(block, axis_name), exclude=exclude, columns=True).column)


def disco_backward(
    backend: Backend,
    block: Block,
    cotangents: Cotangents,
    *,
    axis_name: AxisName | None,
    exclude: bool,
    wanted: Wanted,
) -> Gradient:
    """DisCo-CLIP's hand-written backward: gather again, and reduce-scatter what belongs to other devices.

    Arguments and results as `ring.backward`.
    """

    def backward(block: Block, cotangents: Cotangents) -> Gradient:
        nothing = backend.accumulators(block, wanted, accumulation_dtype(block.x.dtype))
        found = backend.backward(block, cotangents, nothing, exclude=exclude)
        return backend.gradient(block, cotangents, found, wanted)

    if axis_name is None:
        return backward(block, cotangents)
    if cotangents.column is not None:  # half with either product, as in `local`
        cotangents = cotangents._replace(positive_weight=cotangents.positive_weight / 2)
    rows_only = cotangents._replace(column=None, column_weight=None)
    of_rows = backward(_all_columns(block._replace(y_scale=None), axis_name), rows_only)
    gradient = of_rows._replace(y=_scatter(of_rows.y, axis_name))
    if cotangents.column is None:
        return gradient
    everyone = _all_rows(block, axis_name)
    nothing = jnp.zeros(everyone.x.shape[:1], cotangents.row_weight.dtype)
    columns_only = cotangents._replace(
        row=empty_log_sum(everyone.x[:, 0].astype(nothing.dtype)),
        row_weight=nothing,
        positive=_gather(cotangents.positive, axis_name),
        positive_weight=_gather(cotangents.positive_weight, axis_name),
    )
    of_columns = backward(everyone, columns_only)
    x_scale = of_columns.x_scale
    if x_scale is not None and x_scale.ndim:
        x_scale = _scatter(x_scale, axis_name)
    of_columns = of_columns._replace(x=_scatter(of_columns.x, axis_name), x_scale=x_scale)
    return jax.tree.map(
        lambda a, b: b if a is None else a if b is None else a + b, gradient, of_columns, is_leaf=lambda a: a is None
    )


def _all_columns(block: Block, axis_name: AxisName) -> Block:
    """This device's rows against the columns of all devices."""
    y, y_scale, y_mask = _gather((block.y, block.y_scale, block.y_mask), axis_name)
    return block._replace(y=y, y_scale=y_scale, y_mask=y_mask, labels=_global_labels(block, axis_name))


def _all_rows(block: Block, axis_name: AxisName) -> Block:
    """The rows of all devices against this device's columns; labels of other devices' columns are out of range."""
    x_scale = _gather(block.x_scale, axis_name) if block.x_scale.ndim else block.x_scale
    x, x_mask, labels = _gather((block.x, block.x_mask, _global_labels(block, axis_name)), axis_name)
    labels = labels - lax.axis_index(axis_name) * block.y.shape[0]
    return block._replace(x=x, x_scale=x_scale, x_mask=x_mask, labels=labels)


def _gather_all(block: Block, axis_name: AxisName) -> Block:
    columns = _all_columns(block, axis_name)
    rows = _all_rows(block, axis_name)
    return rows._replace(
        y=columns.y, y_scale=columns.y_scale, y_mask=columns.y_mask, labels=_gather(columns.labels, axis_name)
    )


def _global_labels(block: Block, axis_name: AxisName) -> Array:
    return block.labels + lax.axis_index(axis_name) * block.y.shape[0]


def _gather(tree: Any, axis_name: AxisName) -> Any:
    return jax.tree.map(lambda a: lax.all_gather(a, axis_name, tiled=True), tree)


def _scatter(array: Array | None, axis_name: AxisName) -> Array | None:
    return None if array is None else lax.psum_scatter(array, axis_name, tiled=True)
