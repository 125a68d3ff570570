"""Pairwise sigmoid loss of SigLIP.

Forward and backward each rotate the text blocks around the ring once.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int32

from infcl_jax.losses.base import Loss, LossOutput
from infcl_jax.losses.batch import Array, AxisName, check_pairs, checked_scalar, global_mean, over_mesh
from infcl_jax.losses.directions import count_extra_positives
from infcl_jax.ops.common.checks import check_implementation
from infcl_jax.ops.pairwise.checks import checked_ids, checked_mask
from infcl_jax.ops.pairwise.sigmoid import SIGMOID_IMPLEMENTATIONS, pairwise_sigmoid

if TYPE_CHECKING:
    from infcl_jax.models import CLIPOutput


def siglip_loss(
    image: Float[Array, "b d"],
    text: Float[Array, "b d"],
    logit_scale: Float[Array, ""] | float,
    logit_bias: Float[Array, ""] | float,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Bool[Array, "b"] | None = None,
    image_ids: Int32[Array, "b"] | Int32[Array, "b 2"] | None = None,
    text_ids: Int32[Array, "b"] | Int32[Array, "b 2"] | None = None,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Pairwise sigmoid loss over all pairs of the global batch.

    The loss is `1/b sum_ij softplus(-z_ij (scale * s_ij + bias))` with `s_ij = <image_i, text_j>`, and z = 1 on the
    diagonal, else -1. With ids, z = 1 wherever an image and a text have equal ids. Zhai et al., "Sigmoid Loss for
    Language Image Pre-Training", eq. 1 and section 3.3 (text features rotate around the devices).

    Examples:
      >>> loss = siglip_loss(image, text, 10.0, -10.0)
      >>> print(f"{loss:.2f}")
      1.56

    Args:
      image: `[b, D]` L2-normalized features, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      logit_scale: scalar inverse temperature.
      logit_bias: scalar bias.
      axis_name: mesh axis (or axes) of the batch, see `clip_loss`.
      mesh: mesh over which the global arrays are sharded, see `clip_loss`.
      mask: bool `[b]`, False for masked pairs (padding), which the sum and b exclude. Their features may have any
        values, including NaN.
      image_ids: int32 `[b]`, or `[b, 2]` for 64-bit ids. None: the positive of image i is text i.
      text_ids: int32 `[b]` or `[b, 2]`. Masked pairs match no id.
      implementation: "xla" (strips of a block), "ring" (whole blocks), the fused GPU kernels "mosaic_gpu" and "triton",
        or None for the best on this device.

    Returns:
      Scalar in fp32 (fp64 for fp64 features), the same on every device.

    Raises:
      ValueError: shapes or dtypes do not match, ids are not int32, or the implementation is unknown or does not support
        the device.
    """
    check_pairs(image, text)
    check_implementation(implementation, SIGMOID_IMPLEMENTATIONS)
    ids = checked_ids({"image_ids": image_ids, "text_ids": text_ids}, (len(image), len(text)))
    mask = checked_mask("mask", mask, image.shape[0])
    shared = (checked_scalar("logit_scale", logit_scale, image), checked_scalar("logit_bias", logit_bias, image))
    return over_mesh(_loss, implementation, (image, text, mask, *ids), shared, axis_name=axis_name, mesh=mesh)


def _loss(implementation: str | None, axis_name: AxisName | None, sharded: Any, shared: Any) -> Float[Array, ""]:
    image, text, mask, image_ids, text_ids = sharded
    terms = pairwise_sigmoid(
        image,
        text,
        *shared,
        axis_name=axis_name,
        x_ids=image_ids,
        y_ids=text_ids,
        mask=mask,
        implementation=implementation,
    )
    # Positives, one of the b terms of a row, are summed separately.
    return global_mean(terms.negative, mask, axis_name) + global_mean(terms.positive, mask, axis_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipLoss(Loss):
    """`siglip_loss` as a training loss.

    Examples:
      >>> loss = SiglipLoss(name="siglip")
      >>> value = loss(CLIPOutput(image, text, jnp.float32(10.0), jnp.float32(-10.0))).value
      >>> print(f"{value:.2f}")
      1.56
    """

    max_logit_scale: float = math.inf

    implementations: ClassVar[tuple[str, ...]] = SIGMOID_IMPLEMENTATIONS

    def __call__(self, output: "CLIPOutput", **inputs: Any) -> LossOutput:
        """Compute the loss of the model output for the global batch.

        Raises:
          ValueError: the model has no logit bias.
        """
        if output.logit_bias is None:
            raise ValueError(
                "expected a model with a logit bias for the siglip loss, got none; set model_overrides "
                "init_logit_bias=-10"
            )
        ids = inputs.get("ids")
        value = siglip_loss(
            *output,
            axis_name=self.axis_name,
            mesh=self.mesh,
            image_ids=ids,
            text_ids=ids,
            implementation=self.implementation,
        )
        return LossOutput(value, extra_positives=count_extra_positives(ids))
