"""Symmetric InfoNCE loss of CLIP."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int32

from infcl_jax.losses.base import IMAGE_TEXT_TEACHER, Loss, LossOutput
from infcl_jax.losses.batch import Array, AxisName, check_pairs, checked_scalar, checked_weights, over_mesh
from infcl_jax.losses.directions import (
    count_extra_positives,
    mean_of_both,
    uniform_logit,
    with_positive,
    with_positives,
)
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.ops.pairwise.checks import checked_ids
from infcl_jax.ops.pairwise.lse import MULTI_POSITIVE, pairwise_lse
from infcl_jax.ops.pairwise.lse.guide import Margin, check_guide

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
    weights: Float[Array, "b"] | None = None,
    image_ids: Int32[Array, "b"] | Int32[Array, "b 2"] | None = None,
    text_ids: Int32[Array, "b"] | Int32[Array, "b 2"] | None = None,
    multi_positive: str = "mean",
    label_smoothing: float = 0.0,
    guide: tuple[Float[Array, "b dg"], Float[Array, "b dg"]] | None = None,
    margin: float = 0.0,
    margin_strategy: str = "absolute",
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

    With ids, all images and texts of equal ids are positives of each other, so that a repeated caption is no negative.
    With `p` over the texts with the id of image i, the loss of the image is

        row_i - mean_p(scale * s_ip)                 multi_positive="mean"
        row_i - log sum_p exp(scale * s_ip)          multi_positive="any"

    Texts are alike. The loss is half the mean over the images plus half the mean over the texts that have a positive.
    Khosla et al., "Supervised Contrastive Learning", L_out and L_in; Yang et al., "Unified Contrastive Learning in
    Image-Text-Label Space"; Miech et al., "End-to-End Learning of Visual Representations" (MIL-NCE).

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
      weights: `[b]` weights of the pairs in the means; None for equal weights. A pair of weight 0 remains a negative.
      image_ids: int32 `[b]`, or `[b, 2]` for 64-bit ids. None: the positive of image i is text i. With all ids
        different and `text_ids` equal to `image_ids`, the loss is that without ids, from the same arithmetic.
      text_ids: int32 `[b]` or `[b, 2]`. Masked pairs match no id.
      multi_positive: "mean" of the positives' cross entropies, or "any": the sum of their probabilities.
      label_smoothing: share of each target that is spread evenly over all unmasked pairs of a row or column, in
        [0, 1).
      guide: image and text features `[b, Dg]` of another model, which leaves out false negatives. With its similarities
        t_ij, text j is no negative of image i if `t_ij > t_ii - margin`, and image i is no negative of text j if
        `t_ij > t_jj - margin`. Positives stay, and the guide gets no gradient, see `pairwise_lse`.
      margin: by how much a negative must be less similar in the guide than the own pair.
      margin_strategy: "absolute", or "relative": `margin * |t_ii|` in place of `margin`.
      implementation: backend, see `pairwise_lse`.

    Returns:
      Scalar in fp32 (fp64 for fp64 features); 0 if all pairs are masked or no id matches.

    Raises:
      ValueError: shapes or dtypes do not match, ids are not int32, an option is out of range, the batch size is not
        divisible by the device count, or `axis_name` is missing inside `shard_map`.
    """
    check_pairs(image, text)
    check_choice("multi_positive", multi_positive, MULTI_POSITIVE)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"expected label_smoothing in [0, 1), got {label_smoothing}")
    if guide is not None and label_smoothing:
        raise ValueError(f"expected label_smoothing 0 with a guide, got {label_smoothing}")
    margins = Margin(margin, margin_strategy)
    check_guide(guide, margins, len(image), len(text))
    ids = checked_ids({"image_ids": image_ids, "text_ids": text_ids}, (len(image), len(text)))
    scale = checked_scalar("logit_scale", logit_scale, image)
    settings = _Settings(implementation, multi_positive, label_smoothing, margins)
    sharded = (image, text, mask, checked_weights(weights, image), guide, *ids)
    return over_mesh(_loss, settings, sharded, scale, axis_name=axis_name, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Static settings of one call, as described by `clip_loss`."""

    implementation: str | None
    multi_positive: str
    label_smoothing: float
    margin: Margin


def _loss(settings: _Settings, axis_name: AxisName | None, sharded: Any, scale: Float[Array, ""]) -> Float[Array, ""]:
    image, text, mask, weights, guide, image_ids, text_ids = sharded
    smoothing = settings.label_smoothing
    row_lse, column_lse, positive = pairwise_lse(
        image,
        text,
        scale,
        axis_name=axis_name,
        positives="exclude",
        x_ids=image_ids,
        y_ids=text_ids,
        multi_positive=settings.multi_positive,
        x_mask=mask,
        y_mask=mask,
        guide=guide,
        margin=settings.margin.value,
        margin_strategy=settings.margin.strategy,
        implementation=settings.implementation,
    )
    if image_ids is None:
        positive = scale * positive
        rows, columns = (with_positive(lse, positive, mask, smoothing) for lse in (row_lse, column_lse))
    else:
        rows = with_positives(row_lse, positive.row, smoothing)
        columns = with_positives(column_lse, positive.col, smoothing)
    loss = mean_of_both(rows, columns, weights, axis_name)
    if smoothing:
        loss = loss - smoothing * uniform_logit(image, text, scale, mask, weights, rows, columns, axis_name)
    return loss


class ClipLoss(Loss):
    """`clip_loss` as a training loss.

    Examples:
      >>> loss = ClipLoss(name="clip")
      >>> value = loss(CLIPOutput(image, text, jnp.float32(14.3), logit_bias=None)).value
      >>> print(f"{value:.2f}")
      0.39
    """

    guide_inputs: ClassVar[tuple[str, ...]] = IMAGE_TEXT_TEACHER

    def __call__(self, output: "CLIPOutput", **inputs: Any) -> LossOutput:
        """Compute the loss of the model output for the global batch."""
        image, text, scale, _ = output
        ids = inputs.get("ids")
        value = clip_loss(
            image,
            text,
            scale,
            axis_name=self.axis_name,
            mesh=self.mesh,
            image_ids=ids,
            text_ids=ids,
            multi_positive=self.targets.multi_positive,
            label_smoothing=self.targets.label_smoothing,
            implementation=self.implementation,
            **self.guide_options(inputs),
        )
        return LossOutput(value, extra_positives=count_extra_positives(ids))
