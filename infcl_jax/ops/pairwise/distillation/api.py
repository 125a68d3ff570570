"""Function `pair_logits`: dispatch."""

import jax.numpy as jnp
from jaxtyping import Bool, Float

from infcl_jax.ops.pairwise.base import Array, AxisName
from infcl_jax.ops.pairwise.distillation.block import DistillationBlock, PairLogits
from infcl_jax.ops.pairwise.distillation.rule import Distillation
from infcl_jax.ops.pairwise.implementations import compute


def pair_logits(
    implementation: str,
    axis_name: AxisName | None,
    x: Float[Array, "b d"],
    y: Float[Array, "b d"],
    scale: Float[Array, ""],
    teacher_x: Float[Array, "b dt"],
    teacher_y: Float[Array, "b dt"],
    teacher_scale: Float[Array, ""],
    mask: Bool[Array, "b"] | None,
) -> PairLogits:
    """Compute what a contrastive loss with distillation needs of all pairs.

    Memory is linear in the batch size. The positive of row i is column i of the same device. The gradient covers the
    student's features and scale.

    Args:
      implementation: one of `implementations_of("distillation")`.
      axis_name: mesh axes of the batch; None for one device.
      x: student's row features.
      y: student's column features.
      scale: student's inverse temperature.
      teacher_x: teacher's row features.
      teacher_y: teacher's column features.
      teacher_scale: teacher's inverse temperature.
      mask: False for masked rows and columns.
    """
    labels = jnp.arange(len(x), dtype=jnp.int32)
    block = DistillationBlock(x, y, scale, teacher_x, teacher_y, teacher_scale, mask, mask, labels)
    return compute(implementation, Distillation(), block, axis_name)
