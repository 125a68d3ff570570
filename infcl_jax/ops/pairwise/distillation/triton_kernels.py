"""Triton kernels of distillation, which `triton` launches; importing them needs Triton.

A program computes one tile of the student's similarities s and of the teacher's similarities u, both `[block_m,
block_n]`, one GEMM after the other, and its epilogue. `kernel_api` describes the vectors, see
`pairwise.triton_kernels`.
"""

import triton
import triton.language as tl

from infcl_jax.ops.pairwise.triton_kernels import (
    find_positives,
    is_positive,
    load_columns,
    load_rows,
    replace_positives,
    similarity_tile,
    store_columns,
    store_ds,
    store_rows,
    tile_of,
)


@triton.jit
def exponential(logits, row_shift, column_masked):
    """Compute the exponentials of a tile; 0 for masked pairs."""
    shift = row_shift[:, None]
    if column_masked is not None:
        shift += column_masked[None, :]
    return tl.exp2(logits - shift)


@triton.jit
def sums_kernel(
    x_ptr, y_ptr, teacher_x_ptr, teacher_y_ptr, scale_ptr, teacher_scale_ptr, row_shift_ptr, teacher_row_shift_ptr,
    column_masked_ptr, labels_ptr, window_ptr,
    row_negatives_ptr, row_teacher_ptr, row_difference_ptr,
    column_negatives_ptr, column_teacher_ptr, column_difference_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one tile over its columns and over its rows."""
    tile = tile_of(window_ptr, SETTINGS)
    # Loaded before the main loop to hide the latency.
    scale, teacher_scale = tl.load(scale_ptr), tl.load(teacher_scale_ptr)
    row_shift = load_rows(row_shift_ptr, tile, SETTINGS)
    teacher_row_shift = load_rows(teacher_row_shift_ptr, tile, SETTINGS)
    column_masked = load_columns(column_masked_ptr, tile, SETTINGS)
    z = similarity_tile(x_ptr, y_ptr, tile.start_m, tile.start_n, SETTINGS.gemm, SETTINGS) * scale
    u = similarity_tile(teacher_x_ptr, teacher_y_ptr, tile.start_m, tile.start_n, SETTINGS.other, SETTINGS)
    t = u * teacher_scale
    positives = find_positives(labels_ptr, None, tile, SETTINGS)
    e = replace_positives(exponential(z, row_shift, column_masked), positives, 0.0)
    store_rows(row_negatives_ptr, tile, tl.sum(e, 1))
    store_columns(column_negatives_ptr, tile, tl.sum(e, 0))
    f = exponential(t, teacher_row_shift, column_masked)
    store_rows(row_teacher_ptr, tile, tl.sum(f, 1))
    store_columns(column_teacher_ptr, tile, tl.sum(f, 0))
    difference = f * (t - z)
    store_rows(row_difference_ptr, tile, tl.sum(difference, 1))
    store_columns(column_difference_ptr, tile, tl.sum(difference, 0))


@triton.jit
def store_gradient(student, teacher, s, tile, moment_ptr, ds_ptr, SETTINGS):
    """Subtract the teacher's from the student's term in fp32; store dS and its moments."""
    ds = student - teacher
    if moment_ptr is not None:
        store_rows(moment_ptr, tile, tl.sum(ds * s, 1))
    store_ds(ds_ptr, ds, tile, SETTINGS)


@triton.jit
def ds_kernel(
    x_ptr, y_ptr, teacher_x_ptr, teacher_y_ptr, scale_ptr, teacher_scale_ptr, row_shift_ptr, teacher_row_shift_ptr,
    column_masked_ptr, labels_ptr, window_ptr,
    row_weight_ptr, column_weight_ptr, teacher_row_weight_ptr, teacher_column_weight_ptr, positive_weight_ptr,
    moment_ptr, ds_ptr,
    SETTINGS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dS and its row moments."""
    tile = tile_of(window_ptr, SETTINGS)
    # Loaded before the main loop to hide the latency.
    scale, teacher_scale = tl.load(scale_ptr), tl.load(teacher_scale_ptr)
    row_shift = load_rows(row_shift_ptr, tile, SETTINGS)
    teacher_row_shift = load_rows(teacher_row_shift_ptr, tile, SETTINGS)
    row_weight = load_rows(row_weight_ptr, tile, SETTINGS)
    teacher_row_weight = load_rows(teacher_row_weight_ptr, tile, SETTINGS)
    column_weight = load_columns(column_weight_ptr, tile, SETTINGS)
    teacher_column_weight = load_columns(teacher_column_weight_ptr, tile, SETTINGS)
    column_masked = load_columns(column_masked_ptr, tile, SETTINGS)
    s = similarity_tile(x_ptr, y_ptr, tile.start_m, tile.start_n, SETTINGS.gemm, SETTINGS)
    u = similarity_tile(teacher_x_ptr, teacher_y_ptr, tile.start_m, tile.start_n, SETTINGS.other, SETTINGS)
    e = exponential(s * scale, row_shift, column_masked)
    f = exponential(u * teacher_scale, teacher_row_shift, column_masked)
    student = e * (row_weight[:, None] + column_weight[None, :])
    teacher = f * (teacher_row_weight[:, None] + teacher_column_weight[None, :])
    positives = find_positives(labels_ptr, None, tile, SETTINGS)
    # Stored in both branches, because registers do not hold the tiles beyond a branch.
    if positives.present:
        if labels_ptr is not None:
            weight = load_rows(positive_weight_ptr, tile, SETTINGS)[:, None]
            student = tl.where(is_positive(positives, s.shape[1]), weight, student)
        store_gradient(student, teacher, s, tile, moment_ptr, ds_ptr, SETTINGS)
    else:
        store_gradient(student, teacher, s, tile, moment_ptr, ds_ptr, SETTINGS)
