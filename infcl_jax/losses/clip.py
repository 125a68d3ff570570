"""Symmetric InfoNCE loss of CLIP."""

from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh
from jaxtyping import Bool, Float

from infcl_jax.losses.base import Loss, LossOutput
from infcl_jax.losses.batch import Array, AxisName, check_pairs, checked_scalar, cross_entropy, global_mean, over_mesh
from infcl_jax.ops.pairwise_lse import pairwise_lse

if TYPE_CHECKING:
    from infcl_jax.models import CLIPOutput


def clip_loss(
    image: Float[Array, "b d"],
    text: Float[Array, "b d"],
    logit_scale: Float[Array, ""] | float,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Bool[Array, "b"] | None = None,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Symmetric InfoNCE loss over all pairs of the global batch.

    The loss is `mean_i((row_i + col_i) / 2 - scale * s_ii)` with similarities `s_ij = <image_i, text_j>`. Here `row_i`
    and `col_i` are the log-sum-exp of row i and column i of `scale * s`.

    The loss is exact, differentiable in the features and the scale, and equal on every device. Its gradient does not
    depend on the device count. Radford et al., "Learning Transferable Visual Models From Natural Language Supervision"
    (CLIP), Figure 3. The computation follows Cheng et al. (Inf-CL), see `pairwise_lse`.

    For fp32 features, loss and gradients have a relative error of about 6e-8 times the largest absolute logit. This
    also holds for a loss close to zero, because it is computed from the log-sum-exp over the negatives.

    To take gradients inside `shard_map`, keep its default `check_vma=True`. With `check_vma=False`, JAX transposes the
    sum over devices into another sum. Gradients taken inside `shard_map` are then too large by the device count; take
    them outside.

    Examples:
      >>> loss, gradients = jax.value_and_grad(clip_loss, argnums=(0, 1))(image, text, 14.3)  # one device
      >>> image, text = shard_batch(mesh, (image, text))
      >>> sharded = jax.jit(lambda i, t, s: clip_loss(i, t, s, mesh=mesh))(image, text, 14.3)  # all devices of a mesh
      >>> print(f"{loss:.2f} {sharded:.2f}")
      0.39 0.39

    Args:
      image: `[b, D]` L2-normalized features, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      logit_scale: scalar that multiplies the similarities (the exponential of CLIP's parameter).
      axis_name: mesh axis (or axes) over which the batch is sharded; with `mesh`, its first axis by default. Inside
        `shard_map`, `image` and `text` are this device's rows.
      mesh: mesh over which the global arrays are sharded, outside `shard_map`. With neither `axis_name` nor `mesh`, the
        batch is on one device.
      mask: bool `[b]`, False for masked pairs (padding), which the sums and the mean exclude. Their features may have
        any values, including NaN.
      implementation: backend, see `pairwise_lse`.

    Returns:
      Scalar in fp32 (fp64 for fp64 features); 0 if all pairs are masked.

    Raises:
      ValueError: shapes or dtypes do not match, the batch size is not divisible by the device count, or `axis_name` is
        missing inside `shard_map`.
    """
    check_pairs(image, text)
    scale = checked_scalar("logit_scale", logit_scale, image)
    return over_mesh(_loss, implementation, (image, text, mask), scale, axis_name=axis_name, mesh=mesh)


def _loss(
    implementation: str | None, axis_name: AxisName | None, sharded: Any, scale: Float[Array, ""]
) -> Float[Array, ""]:
    image, text, mask = sharded
    negatives = pairwise_lse(
        image,
        text,
        scale,
        axis_name=axis_name,
        positives="exclude",
        x_mask=mask,
        y_mask=mask,
        implementation=implementation,
    )
    positive = scale * negatives.positive
    rows, columns = cross_entropy(negatives.row, positive), cross_entropy(negatives.col, positive)
    return global_mean((rows + columns) / 2, mask, axis_name)


class ClipLoss(Loss):
    """`clip_loss` as a training loss.

    Examples:
      >>> loss = ClipLoss(name="clip")
      >>> value = loss(CLIPOutput(image, text, jnp.float32(14.3), logit_bias=None)).value
      >>> print(f"{value:.2f}")
      0.39
    """

    def __call__(self, output: "CLIPOutput", **inputs: Any) -> LossOutput:
        """Compute the loss of the model output for the global batch."""
        image, text, scale, _ = output
        value = clip_loss(
            image, text, scale, axis_name=self.axis_name, mesh=self.mesh, implementation=self.implementation
        )
        return LossOutput(value)
