"""Triton kernels of distillation, which `triton` launches; importing them needs Triton.

A program computes one tile of the student's similarities s and of the teacher's similarities u, both `[BLOCK_M,
BLOCK_N]`, one GEMM after the other, and its epilogue. `kernel_api` describes the vectors. The constants are those of
`pairwise.triton_kernels`; those of the teacher's features begin with TEACHER.
"""

import triton
import triton.language as tl

from infcl_jax.ops.pairwise.triton_kernels import (
    find_positives,
    has_positives,
    load_vector,
    similarity_tile,
    store_columns,
    store_ds,
    store_rows,
    tile_of,
)


@triton.jit
def exponent(logits, row_shift, column_masked):
    """Subtract the max-shift; masked pairs get -inf."""
    shift = row_shift[:, None]
    if column_masked is not None:
        shift += column_masked[None, :]
    return logits - shift


@triton.jit
def store_sums(e, f, difference, tile, rows, columns):
    """Store the sums of a tile over its columns and over its rows."""
    store_rows(rows[0], tile, tl.sum(e, 1))
    store_rows(rows[1], tile, tl.sum(f, 1))
    store_rows(rows[2], tile, tl.sum(difference, 1))
    store_columns(columns[0], tile, tl.sum(e, 0))
    store_columns(columns[1], tile, tl.sum(f, 0))
    store_columns(columns[2], tile, tl.sum(difference, 0))


@triton.jit
def sums_kernel(
    x_ptr, y_ptr, teacher_x_ptr, teacher_y_ptr, scale_ptr, teacher_scale_ptr, row_shift_ptr, teacher_row_shift_ptr,
    column_masked_ptr, labels_ptr, window_ptr,
    row_negatives_ptr, row_teacher_ptr, row_difference_ptr,
    column_negatives_ptr, column_teacher_ptr, column_difference_ptr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr, X_TERMS: tl.constexpr, Y_TERMS: tl.constexpr,
    TEACHER_WIDTH: tl.constexpr, TEACHER_STRIDE: tl.constexpr,
    TEACHER_PAIRS: tl.constexpr, TEACHER_X_TERMS: tl.constexpr, TEACHER_Y_TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one tile over its columns and over its rows."""
    tile, start_m, start_n = tile_of(window_ptr, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    # Loaded before the main loop to hide the latency.
    scale, teacher_scale = tl.load(scale_ptr), tl.load(teacher_scale_ptr)
    row_shift, teacher_row_shift = tl.load(row_shift_ptr + offs_m), tl.load(teacher_row_shift_ptr + offs_m)
    column_masked = load_vector(column_masked_ptr, offs_n)
    s = similarity_tile(
        x_ptr, y_ptr, start_m, start_n, WIDTH, STRIDE, NUM_PAIRS, X_TERMS, Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D
    )  # fmt: skip
    u = similarity_tile(
        teacher_x_ptr, teacher_y_ptr, start_m, start_n, TEACHER_WIDTH, TEACHER_STRIDE, TEACHER_PAIRS, TEACHER_X_TERMS,
        TEACHER_Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    z, t = s * scale, u * teacher_scale
    e = tl.exp2(exponent(z, row_shift, column_masked))
    f = tl.exp2(exponent(t, teacher_row_shift, column_masked))
    difference = f * (t - z)
    rows = row_negatives_ptr, row_teacher_ptr, row_difference_ptr
    columns = column_negatives_ptr, column_teacher_ptr, column_difference_ptr
    if labels_ptr is None:
        store_sums(e, f, difference, tile, rows, columns)
    else:
        # Few tiles contain positives. Only these compare every pair with the labels.
        label = tl.load(labels_ptr + offs_m) - start_n
        if has_positives(label, BLOCK_N):
            e = tl.where(find_positives(label, None, BLOCK_N), 0.0, e)
            store_sums(e, f, difference, tile, rows, columns)
        else:
            store_sums(e, f, difference, tile, rows, columns)


@triton.jit
def store_gradient(student, teacher, s, tile, moment_ptr, ds_ptr, DS_TERMS: tl.constexpr):
    """Subtract the teacher's from the student's term in fp32; store dS and its moments."""
    ds = student - teacher
    if moment_ptr is not None:
        store_rows(moment_ptr, tile, tl.sum(ds * s, 1))
    store_ds(ds_ptr, ds, tile, DS_TERMS)


@triton.jit
def ds_kernel(
    x_ptr, y_ptr, teacher_x_ptr, teacher_y_ptr, scale_ptr, teacher_scale_ptr, row_shift_ptr, teacher_row_shift_ptr,
    column_masked_ptr, labels_ptr, window_ptr,
    row_weight_ptr, column_weight_ptr, teacher_row_weight_ptr, teacher_column_weight_ptr, positive_weight_ptr,
    moment_ptr, ds_ptr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr, X_TERMS: tl.constexpr, Y_TERMS: tl.constexpr,
    TEACHER_WIDTH: tl.constexpr, TEACHER_STRIDE: tl.constexpr,
    TEACHER_PAIRS: tl.constexpr, TEACHER_X_TERMS: tl.constexpr, TEACHER_Y_TERMS: tl.constexpr,
    DS_TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dS and its row moments."""
    tile, start_m, start_n = tile_of(window_ptr, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    # Loaded before the main loop to hide the latency.
    scale, teacher_scale = tl.load(scale_ptr), tl.load(teacher_scale_ptr)
    row_shift, teacher_row_shift = tl.load(row_shift_ptr + offs_m), tl.load(teacher_row_shift_ptr + offs_m)
    row_weight, teacher_row_weight = tl.load(row_weight_ptr + offs_m), tl.load(teacher_row_weight_ptr + offs_m)
    column_weight, teacher_column_weight = (
        tl.load(column_weight_ptr + offs_n),
        tl.load(teacher_column_weight_ptr + offs_n),
    )
    column_masked = load_vector(column_masked_ptr, offs_n)
    s = similarity_tile(
        x_ptr, y_ptr, start_m, start_n, WIDTH, STRIDE, NUM_PAIRS, X_TERMS, Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D
    )  # fmt: skip
    u = similarity_tile(
        teacher_x_ptr, teacher_y_ptr, start_m, start_n, TEACHER_WIDTH, TEACHER_STRIDE, TEACHER_PAIRS, TEACHER_X_TERMS,
        TEACHER_Y_TERMS, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    e = tl.exp2(exponent(s * scale, row_shift, column_masked))
    f = tl.exp2(exponent(u * teacher_scale, teacher_row_shift, column_masked))
    student = e * (row_weight[:, None] + column_weight[None, :])
    teacher = f * (teacher_row_weight[:, None] + teacher_column_weight[None, :])
    if labels_ptr is None:
        store_gradient(student, teacher, s, tile, moment_ptr, ds_ptr, DS_TERMS)
    else:
        label = tl.load(labels_ptr + offs_m) - start_n
        if has_positives(label, BLOCK_N):
            weight = tl.load(positive_weight_ptr + offs_m)[:, None]
            student = tl.where(find_positives(label, None, BLOCK_N), weight, student)
            store_gradient(student, teacher, s, tile, moment_ptr, ds_ptr, DS_TERMS)
        else:
            store_gradient(student, teacher, s, tile, moment_ptr, ds_ptr, DS_TERMS)
