"""Distillation of a teacher's similarities into a student."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from infcl_jax.losses.batch import (
    Array,
    AxisName,
    check_pairs,
    checked_scalar,
    checked_weights,
    cross_entropy,
    global_mean,
    over_mesh,
)
from infcl_jax.ops.common.checks import check_implementation
from infcl_jax.ops.pairwise.base import accumulation_dtype, similarities, varying_over, zero_masked
from infcl_jax.ops.pairwise.checks import check_axis, check_features, checked_mask
from infcl_jax.ops.pairwise.distillation.api import pair_logits
from infcl_jax.ops.pairwise.distillation.block import PairLogits
from infcl_jax.ops.pairwise.implementations import best_implementation, check_device, implementations_of

IMPLEMENTATIONS = ("dense", *implementations_of("distillation"))


def distillation_loss(
    image: Float[Array, "b d"],
    text: Float[Array, "b d"],
    scale: Float[Array, ""] | float,
    teacher_image: Float[Array, "b dt"],
    teacher_text: Float[Array, "b dt"],
    teacher_scale: Float[Array, ""] | float,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Bool[Array, "b"] | None = None,
    weights: Float[Array, "b"] | None = None,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """KL divergence of a student from a teacher over all pairs.

    Image i has the softmax `q_i` of `scale * <image_i, text_j>` over the texts, and the softmax `p_i` of the teacher.
    Its divergence is `KL(p_i || q_i) = sum_j p_ij log(p_ij / q_ij)` in nats. Texts are alike, with softmaxes over the
    images. The loss is the mean over the pairs of half the sum of both. Hinton et al., "Distilling the Knowledge in a
    Neural Network"; Wu et al., "TinyCLIP" (affinity mimicking).

    OpenCLIP's `DistillClipLoss` has the cross entropy in place of the divergence. It is larger by a constant, the mean
    entropy of the teacher's softmaxes over both directions. Its gradients are the same.

    Memory is linear in the batch. One ring sweep carries the blocks of both models. The loss is differentiable in the
    student's features and scale; the teacher gets no gradient. It is exact and equal on every device, with an absolute
    error of about 1e-7 times the largest logit for fp32 features.

    Examples:
      >>> loss = distillation_loss(image, text, 14.3, image, text, 20.0)  # the same features, another temperature
      >>> print(f"{loss:.3f}")
      0.011
      >>> teacher = jnp.roll(image, 1, axis=0)
      >>> print(f"{distillation_loss(image, text, 14.3, teacher, text, 20.0):.2f}")
      18.95

    Args:
      image: `[b, D]` L2-normalized features of the student, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      scale: scalar inverse temperature of the student.
      teacher_image: `[b, Dt]` L2-normalized features of the teacher, any floating dtype.
      teacher_text: `[b, Dt]`, same dtype as `teacher_image`.
      teacher_scale: scalar inverse temperature of the teacher.
      axis_name: mesh axis (or axes) of the batch, see `clip_loss`.
      mesh: mesh over which the global arrays are sharded, see `clip_loss`.
      mask: bool `[b]`, False for masked pairs (padding), which the softmaxes and the mean exclude. Their features may
        have any values, including NaN.
      weights: `[b]` weights of the pairs in the mean; None for equal weights.
      implementation: "xla" (strips of a block), "ring" (whole blocks), "dense" (all pairs on every device),
        "mosaic_gpu" or "triton" (fused kernels for Hopper GPUs, and for Ampere, Ada and Hopper GPUs; the student's
        features are not fp64), or None for the best on this device.

    Returns:
      Scalar in fp32 (fp64 for fp64 features of the student); 0 if all pairs are masked.

    Raises:
      ValueError: shapes or dtypes do not match, the implementation is unknown or needs another device or dtype, the
        batch size is not divisible by the device count, or `axis_name` is missing inside `shard_map`.
    """
    teacher = teacher_image, teacher_text, teacher_scale
    options: dict[str, Any] = {"axis_name": axis_name, "mesh": mesh, "mask": mask, "weights": weights}
    return clip_and_distillation(image, text, scale, *teacher, **options, implementation=implementation)[1]


def clip_and_distillation(
    image: Float[Array, "b d"],
    text: Float[Array, "b d"],
    scale: Float[Array, ""] | float,
    teacher_image: Float[Array, "b dt"],
    teacher_text: Float[Array, "b dt"],
    teacher_scale: Float[Array, ""] | float,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Bool[Array, "b"] | None = None,
    weights: Float[Array, "b"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return `clip_loss` and `distillation_loss` from one sweep over the pairs.

    Arguments and errors are as in `distillation_loss`. The student's similarities serve both, so a mixture of the
    two costs as much as the distillation alone.

    Examples:
      >>> clip, distillation = clip_and_distillation(image, text, 14.3, image, text, 20.0)
      >>> print(f"{clip:.2f} {distillation:.3f}")
      0.39 0.011
    """
    check_implementation(implementation, IMPLEMENTATIONS)
    check_pairs(image, text)
    check_features(image, text)
    _check_teacher(image, teacher_image, teacher_text)
    mask = checked_mask("mask", mask, image.shape[0])
    scales = tuple(
        checked_scalar(name, value, image) for name, value in (("scale", scale), ("teacher_scale", teacher_scale))
    )
    sharded = (image, text, teacher_image, teacher_text, mask, checked_weights(weights, image))
    implementation = implementation or best_implementation(image.dtype)
    check_device(implementation, image.dtype)
    over: dict[str, Any] = {"axis_name": axis_name, "mesh": mesh, "sharded_result": (False, False)}
    return over_mesh(_losses, implementation, sharded, scales, **over)


def _losses(implementation: str, axis_name: AxisName | None, sharded: Any, scales: Any) -> tuple[Array, Array]:
    image, text, *teacher, mask, weights = sharded
    check_axis(axis_name, image, text)
    teacher_image, teacher_text, teacher_scale = lax.stop_gradient((*teacher, scales[1]))
    features = [zero_masked(jnp.asarray(a), mask) for a in (image, text, teacher_image, teacher_text)]
    x, y, *teacher = (a.astype(jnp.float32) if a.dtype == jnp.float16 else a for a in features)
    scale, teacher_scale = (a.astype(accumulation_dtype(x.dtype)) for a in (scales[0], teacher_scale))
    operands = varying_over((x, y, scale, *teacher, teacher_scale, mask), axis_name)
    if implementation == "dense":
        logits = _dense_logits(axis_name, operands)
    else:
        logits = pair_logits(implementation, axis_name, *operands)
    # KL(teacher || student) of each row and of each column
    row = logits.row_gap + jnp.logaddexp(logits.row_negatives, logits.positive)
    column = logits.column_gap + jnp.logaddexp(logits.column_negatives, logits.positive)
    clip_row, clip_column = (
        cross_entropy(lse, logits.positive) for lse in (logits.row_negatives, logits.column_negatives)
    )
    clip, divergence = (clip_row + clip_column) / 2, (row + column) / 2
    return global_mean(clip, mask, axis_name, weights), global_mean(divergence, mask, axis_name, weights)


def _dense_logits(axis_name: AxisName | None, operands: tuple[Any, ...]) -> PairLogits:
    """Compute the logits from the whole pair matrices on every device, differentiated by JAX."""
    x, y, scale, teacher_x, teacher_y, teacher_scale, mask = operands
    dtype, rows = scale.dtype, len(x)
    if axis_name is not None:
        mask, teacher_x, teacher_y, x, y = jax.tree.map(
            lambda a: lax.all_gather(a, axis_name, tiled=True), (mask, teacher_x, teacher_y, x, y)
        )
    x, y = x.astype(dtype), y.astype(dtype)  # both terms of a gradient are added before rounding
    z, t = scale * similarities(x, y), teacher_scale * similarities(teacher_x, teacher_y).astype(dtype)
    mask = jnp.ones(len(x), bool) if mask is None else mask
    valid = mask[:, None] & mask[None, :]
    negative = valid & ~jnp.eye(len(x), dtype=bool)

    def side(axis: int) -> tuple[Array, Array]:
        masked = jnp.where(valid, t, jnp.full_like(t, -jnp.finfo(dtype).max))
        shift = masked.max(axis)
        e = jnp.where(valid, jnp.exp(masked - jnp.expand_dims(shift, axis)), jnp.zeros_like(t))
        sumexp = jnp.maximum(e.sum(axis), 1)  # the largest term is 1; masked rows have none
        lse = shift + jnp.log(sumexp)
        # Not exp(t - lse): at a large scale the rounding of lse would keep the probabilities from adding up to one.
        gap = zero_masked((e * (t - z)).sum(axis) / sumexp - lse, mask)
        lowest = jnp.where(negative, z, jnp.full_like(z, -jnp.finfo(dtype).max))
        negatives = jnp.where(negative.any(axis), jax.nn.logsumexp(lowest, axis), jnp.full_like(lse, -jnp.inf))
        return negatives, gap

    (row, row_gap), (column, column_gap) = side(1), side(0)
    logits = PairLogits(row, column, jnp.diagonal(z), row_gap, column_gap)
    if axis_name is None:
        return logits
    first = lax.axis_index(axis_name) * rows
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, rows), logits)


def _check_teacher(image: Array, teacher_image: Array, teacher_text: Array) -> None:
    """Raise `ValueError` unless the teacher has features of the student's pairs."""
    shapes = teacher_image.shape, teacher_text.shape
    if teacher_image.ndim != 2 or shapes[0] != shapes[1] or shapes[0][0] != image.shape[0]:
        raise ValueError(
            f"expected teacher_image and teacher_text of the same shape [{image.shape[0]}, Dt], got {shapes[0]} and "
            f"{shapes[1]}"
        )
    check_features(jnp.asarray(teacher_image), jnp.asarray(teacher_text))
