"""The symmetric InfoNCE loss of CLIP, at any batch size."""

from typing import Any

from jax.sharding import Mesh

from infcl_jax.losses.batch import Array, AxisName, check_pairs, checked_scalar, global_mean, over_mesh
from infcl_jax.pairwise import pairwise_lse


def clip_loss(
    image: Array,
    text: Array,
    logit_scale: Array | float,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Symmetric contrastive loss over all pairs of the global batch: `mean_i((row_i + col_i) / 2 - scale * s_ii)`.

    Exact, differentiable in the features and the scale, and the same value on every device; its gradient is the
    gradient of that one value, with no factor of the device count. Radford et al., "Learning Transferable Visual
    Models From Natural Language Supervision" (CLIP), Figure 3; computed as Cheng et al. (Inf-CL), see `pairwise_lse`.

    Example:
      >>> loss, gradient = jax.value_and_grad(clip_loss)(image, text, 14.3)          # one device
      >>> loss = jax.jit(lambda i, t, s: clip_loss(i, t, s, mesh=mesh))(image, text, scale)  # sharded over a mesh

    Args:
      image: `[b, D]` L2-normalised features, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      logit_scale: scalar that multiplies the similarities (the exponential of CLIP's parameter).
      axis_name: inside `shard_map`: the mesh axis of the batch; `image` and `text` are this device's rows. With `mesh`:
        the axis (or axes) of the mesh over which the batch is sharded, by default its first.
      mesh: outside `shard_map`, under `jit`: the mesh over which the global arrays are sharded. Neither: one device.
      mask: bool `[b]`, False for pairs that do not exist (padding); they count in no sum and not in the mean.
      implementation: see `pairwise_lse`.

    Returns:
      Scalar in fp32 (fp64 for fp64 features); 0 if no pair exists.

    Raises:
      ValueError: shapes or dtypes do not fit, or the devices cannot share the batch evenly.
    """
    check_pairs(image, text)

    def loss(axis_name: AxisName | None, sharded: Any, scale: Array) -> Array:
        image, text, mask = sharded
        lse = pairwise_lse(
            image, text, scale, axis_name=axis_name, x_mask=mask, y_mask=mask, implementation=implementation
        )
        return global_mean((lse.row + lse.col) / 2 - scale * lse.positive, mask, axis_name)

    scale = checked_scalar("logit_scale", logit_scale, image)
    return over_mesh(loss, (image, text, mask), scale, axis_name=axis_name, mesh=mesh)
