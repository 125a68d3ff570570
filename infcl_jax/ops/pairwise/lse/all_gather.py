"""All-gather strategies of CLIP, OpenCLIP and DisCo-CLIP.

They are exact implementations of the same primitive, kept for comparison. `ring.py` needs much less memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int32

from infcl_jax.ops.common.gpu import CUBLAS_WORKSPACE
from infcl_jax.ops.pairwise.base import (
    FP32_BYTES,
    Array,
    AxisName,
    accumulation_dtype,
    accumulator_bytes,
    empty_log_sum,
    join_columns,
    similarity_bytes,
    split_columns,
)
from infcl_jax.ops.pairwise.lse.block import LseBlock, LseCotangents, LseGradient, LseSums, Results
from infcl_jax.ops.pairwise.lse.dense import dense_lse
from infcl_jax.ops.pairwise.lse.xla import LseStrips


def dense(block: LseBlock, *, axis_name: AxisName | None, exclude: bool, columns: bool) -> Results:
    """Compute the whole `[b, b]` matrix on every device, as in CLIP.

    Args:
      block: this device's rows and columns; labels index its own columns.
      axis_name: mesh axis to gather over; None for one device.
      exclude: leave positives out of the sums.
      columns: whether to compute column sums.

    Returns:
      `base.Results` of this device.
    """
    if axis_name is None:
        return dense_lse(block, exclude=exclude, columns=columns)
    row, column, positive = dense_lse(_gather_all(block, axis_name), exclude=exclude, columns=columns)
    rank = lax.axis_index(axis_name)

    def own(tree: Any, rows: int) -> Any:
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, rank * rows, rows), tree)

    x_rows, y_rows = block.x.shape[0], block.y.shape[0]
    row, column = own(row, x_rows), own(column, y_rows)
    if block.x_ids is None:
        return row, column, own(positive, x_rows)
    return row, column, (own(positive[0], x_rows), own(positive[1], y_rows))


def local(block: LseBlock, *, axis_name: AxisName | None, exclude: bool, columns: bool) -> Results:
    """Compare local rows with all columns and all rows with local columns (OpenCLIP).

    Arguments and results are as in `dense`.
    """
    if axis_name is None:
        return dense_lse(block, exclude=exclude, columns=columns)
    row, _, positive = dense_lse(_all_columns(block, axis_name), exclude=exclude, columns=False)
    if not columns:
        return row, None, positive
    _, column, all_positives = dense_lse(_all_rows(block, axis_name), exclude=exclude)
    if block.x_ids is not None:  # each GEMM has the positives of its own sums
        return row, column, (positive[0], all_positives[1])
    # Each of the two GEMMs contributes half of a positive. Its gradient then cancels with that of the GEMM's own sums
    # before rounding.
    rows = block.x.shape[0]
    column_positive = lax.dynamic_slice_in_dim(all_positives, lax.axis_index(axis_name) * rows, rows)
    return row, column, (positive + column_positive) / 2


def disco_forward(backend: LseStrips, block: LseBlock, *, axis_name: AxisName | None) -> LseSums:
    """Compute the forward pass of DisCo-CLIP, which does not save the gathered features.

    Source: Chen et al., "DisCo-CLIP", section 3. The GEMMs are those of `local`. Arguments and results are those of
    `ring.forward`.
    """
    if axis_name is None:
        return backend.forward(block)
    sums = dataclasses.replace(backend, columns=False).forward(_all_columns(block, axis_name))
    if not backend.columns:
        return sums
    column_sums = backend.forward(_all_rows(block, axis_name))
    return sums._replace(column=column_sums.column, column_positives=column_sums.column_positives)


def disco_backward(
    backend: LseStrips,
    block: LseBlock,
    cotangents: LseCotangents,
    *,
    axis_name: AxisName | None,
    needs_grad: LseGradient,
) -> LseGradient:
    """Compute the backward pass of DisCo-CLIP: all-gather again, then reduce-scatter.

    Arguments and results are as in `ring.backward`.
    """

    def backward(block: LseBlock, cotangents: LseCotangents) -> LseGradient:
        zeros = backend.accumulators(block, needs_grad, accumulation_dtype(block.x.dtype))
        acc = backend.backward(block, cotangents, zeros)
        return backend.gradient(block, cotangents, acc, needs_grad)

    if axis_name is None:
        return backward(block, cotangents)
    if cotangents.column is not None and block.labels is not None:  # half of a positive from each GEMM, as in `local`
        cotangents = cotangents._replace(d_positive=cotangents.d_positive / 2)
    rows_only = cotangents._replace(column=None, d_column=None, column_positives=None)
    row_gradient = backward(_all_columns(block._replace(y_scale=None), axis_name), rows_only)
    gradient = row_gradient._replace(y=_scatter(row_gradient.y, axis_name))
    if cotangents.column is None:
        return gradient
    all_rows = _all_rows(block, axis_name)
    zeros = jnp.zeros(all_rows.x.shape[:1], cotangents.d_row.dtype)
    columns_only = cotangents._replace(
        row=empty_log_sum(all_rows.x[:, 0].astype(zeros.dtype)),
        d_row=zeros,
        positive=_gather(cotangents.positive, axis_name),
        d_positive=_gather(cotangents.d_positive, axis_name),
        row_positives=None,
    )
    column_gradient = backward(all_rows, columns_only)
    x_scale = column_gradient.x_scale
    if x_scale is not None and x_scale.ndim:
        x_scale = _scatter(x_scale, axis_name)
    column_gradient = column_gradient._replace(x=_scatter(column_gradient.x, axis_name), x_scale=x_scale)
    return jax.tree.map(  # either may lack a gradient
        lambda a, b: b if a is None else a if b is None else a + b,
        gradient,
        column_gradient,
        is_leaf=lambda a: a is None,
    )


def gathered_bytes(rows: int, width: int, dtype: Any, devices: int) -> int:
    """Bytes of the gathered features of all devices and of their fp32 gradients."""
    return 0 if devices == 1 else 2 * rows * devices * width * (jnp.dtype(dtype).itemsize + FP32_BYTES)


def dense_bytes(rows: int, width: int, dtype: Any, devices: int) -> int:
    """Bytes of `dense` without the gathered features."""
    return similarity_bytes(rows * devices, rows * devices) + CUBLAS_WORKSPACE


def local_bytes(rows: int, width: int, dtype: Any, devices: int) -> int:
    """Bytes of `local` without the gathered features.

    Each direction has its own similarities; on one device both share them.
    """
    return min(devices, 2) * similarity_bytes(rows, rows * devices) + accumulator_bytes(rows, width)


def disco_bytes(rows: int, width: int, dtype: Any, devices: int) -> int:
    """Bytes of `disco` without the gathered features."""
    return similarity_bytes(rows, rows * devices) + accumulator_bytes(rows, width)


def _all_columns(block: LseBlock, axis_name: AxisName) -> LseBlock:
    """Pair this device's rows with the columns of all devices."""
    rows, columns = split_columns(block)
    return join_columns(rows, _gather(columns, axis_name))._replace(
        labels=_global_labels(block, axis_name), x_count=None, y_count=None
    )


def _all_rows(block: LseBlock, axis_name: AxisName) -> LseBlock:
    """Pair the rows of all devices with this device's columns.

    Labels that are columns of other devices are out of range.
    """
    x_scale = _gather(block.x_scale, axis_name) if block.x_scale.ndim else block.x_scale
    names = "x", "x_mask", "x_ids", "x_guide", "x_threshold"
    rows = {name: _gather(getattr(block, name), axis_name) for name in names}
    labels = _gather(_global_labels(block, axis_name), axis_name)
    if labels is not None:
        labels = labels - lax.axis_index(axis_name) * block.y.shape[0]
    return block._replace(**rows, x_scale=x_scale, labels=labels, x_count=None, y_count=None)


def _gather_all(block: LseBlock, axis_name: AxisName) -> LseBlock:
    columns = _all_columns(block, axis_name)
    rows = _all_rows(block, axis_name)
    return join_columns(rows, split_columns(columns)[1])._replace(labels=_gather(columns.labels, axis_name))


def _global_labels(block: LseBlock, axis_name: AxisName) -> Int32[Array, "bx"] | None:
    return None if block.labels is None else block.labels + lax.axis_index(axis_name) * block.y.shape[0]


def _gather(tree: Any, axis_name: AxisName) -> Any:
    return jax.tree.map(lambda a: lax.all_gather(a, axis_name, tiled=True), tree)


def _scatter(array: Float[Array, "n *rest"] | None, axis_name: AxisName) -> Float[Array, "_ *rest"] | None:
    return None if array is None else lax.psum_scatter(array, axis_name, tiled=True)
