"""One-directional InfoNCE with hard negatives for dense text retrieval."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int32, Integer

from infcl_jax.losses.batch import (
    Array,
    AxisName,
    axis_and_devices,
    checked_scalar,
    checked_weights,
    global_mean,
    over_mesh,
)
from infcl_jax.losses.directions import with_positive, with_positives
from infcl_jax.ops.common.checks import check_choice, is_concrete
from infcl_jax.ops.pairwise.checks import checked_ids, checked_labels, checked_mask
from infcl_jax.ops.pairwise.lse import MULTI_POSITIVE, pairwise_lse
from infcl_jax.ops.pairwise.lse.guide import Margin, check_guide


def retrieval_loss(
    query: Float[Array, "bq d"],
    passage: Float[Array, "bp d"],
    scale: Float[Array, ""] | float,
    *,
    labels: Integer[Array, "bq"] | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Bool[Array, "bq"] | None = None,
    passage_mask: Bool[Array, "bp"] | None = None,
    weights: Float[Array, "bq"] | None = None,
    query_ids: Int32[Array, "bq"] | Int32[Array, "bq 2"] | None = None,
    passage_ids: Int32[Array, "bp"] | Int32[Array, "bp 2"] | None = None,
    multi_positive: str = "mean",
    guide: tuple[Float[Array, "bq dg"], Float[Array, "bp dg"]] | None = None,
    margin: float = 0.0,
    margin_strategy: str = "absolute",
    implementation: str | None = None,
) -> Float[Array, ""]:
    """InfoNCE of every query against all passages of the global batch.

    The loss is the mean over queries of `row_i - scale * s_{i, labels_i}`, with `row_i` the log-sum-exp of row i of
    `scale * s`. A passage that is no query's positive is a hard negative for all queries.

    With ids, all passages of equal ids, on all devices, are a query's positives, see `clip_loss`.

    Karpukhin et al., "Dense Passage Retrieval", section 3.2; Gao et al., "Scaling Deep Contrastive Learning Batch Size
    under Memory Limited Setup", eq. 1.

    Examples:
      >>> query, passage = image[:4], text  # the first four passages are positives, the others hard negatives
      >>> print(f"{retrieval_loss(query, passage, 20.0):.2f}")
      0.55

    Args:
      query: `[bq, D]` features, bf16, fp16, fp32 or fp64.
      passage: `[bp, D]` features of the same dtype, `bp >= bq` unless `labels` are given.
      scale: scalar that multiplies the similarities.
      labels: int `[bq]`, row of each query's positive in `passage`; row i by default, which with `mesh` requires
        `bp == bq`. Labels index into the global array with `mesh`, else into this device's rows. A query and its
        positive must be on the same device, as with passages grouped by query
        (`labels = arange(bq) * passages_per_query`).
      axis_name: mesh axis (or axes) of the batch, see `clip_loss`.
      mesh: mesh over which the global arrays are sharded, see `clip_loss`.
      mask: bool `[bq]`, False for masked queries (padding), which the mean excludes.
      passage_mask: bool `[bp]`, False for masked passages, which the sums exclude. The mean also excludes a query whose
        positive is masked. Masked features may have any values, including NaN.
      weights: `[bq]` weights of the queries in the mean; None for equal weights.
      query_ids: int32 `[bq]`, or `[bq, 2]` for 64-bit ids, instead of labels. A query without a positive is outside the
        mean.
      passage_ids: int32 `[bp]` or `[bp, 2]`. Masked passages match no id.
      multi_positive: "mean" of the positives' cross entropies, or "any": the sum of their probabilities.
      guide: query and passage features of another model, which leaves out false negatives. With its similarities t_ij,
        passage j is no negative of query i if `t_ij > t_{i, labels_i} - margin`; hard negatives are treated alike.
        With ids, query i belongs to passage i. The guide gets no gradient, see `pairwise_lse`.
      margin: by how much a negative must be less similar in the guide than the query's positive.
      margin_strategy: "absolute", or "relative": `margin * |t_{i, labels_i}|` in place of `margin`.
      implementation: backend, see `pairwise_lse`.

    Returns:
      Scalar in fp32 (fp64 for fp64 features), the same on every device; 0 if every query is excluded. If a traced label
      is out of range, loss and gradients are NaN.

    Raises:
      ValueError: shapes, dtypes, labels, ids or masks do not match; both labels and ids are given; `axis_name` is
        missing inside `shard_map`; concrete (not traced) labels and masks exclude the positive of every query, or a
        positive is on another device.
    """
    row_mask = checked_mask("mask", mask, query.shape[0])
    column_mask = checked_mask("passage_mask", passage_mask, passage.shape[0])
    check_choice("multi_positive", multi_positive, MULTI_POSITIVE)
    ids = checked_ids({"query_ids": query_ids, "passage_ids": passage_ids}, (len(query), len(passage)), labels)
    by_id = ids[0] is not None
    if mesh is not None and labels is None and not by_id and query.shape[0] != passage.shape[0]:
        raise ValueError(
            f"expected labels when there are more passages than queries on a mesh, got {query.shape[0]} queries and "
            f"{passage.shape[0]} passages"
        )
    # With the caller's masks: under jit, checked ones are tracers, with which labels are not checked.
    if labels is not None:
        checked_labels(labels, query.shape[0], passage.shape[0], mask)
    if mesh is not None and labels is not None:
        _check_same_device(labels, mask, query.shape[0], passage.shape[0], axis_and_devices(mesh, axis_name)[1])
    if not by_id:
        _check_any_positive(labels, mask, passage_mask, query.shape[0])
    margins = Margin(margin, margin_strategy)
    check_guide(guide, margins, len(query), len(passage))
    settings = _Settings(implementation, multi_positive, margins, global_labels=mesh is not None)
    scale = checked_scalar("scale", scale, query)
    sharded = (query, passage, labels, row_mask, column_mask, checked_weights(weights, query), guide, *ids)
    return over_mesh(_loss, settings, sharded, scale, axis_name=axis_name, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Static settings of one call, as described by `retrieval_loss`."""

    implementation: str | None
    multi_positive: str
    margin: Margin
    global_labels: bool  # into the passages of all devices


def _loss(settings: _Settings, axis_name: AxisName | None, sharded: Any, scale: Array) -> Array:
    query, passage, labels, mask, passage_mask, weights, guide, query_ids, passage_ids = sharded
    if labels is not None and settings.global_labels:
        labels = labels.astype(jnp.int32) - lax.axis_index(axis_name) * passage.shape[0]
    if passage_mask is not None and query_ids is None:
        mask = _mask_with_positives(labels, mask, passage_mask, query.shape[0])
    negatives = pairwise_lse(
        query,
        passage,
        scale,
        axis_name=axis_name,
        positives="exclude",
        labels=labels,
        x_ids=query_ids,
        y_ids=passage_ids,
        multi_positive=settings.multi_positive,
        x_mask=mask,
        y_mask=passage_mask,
        columns=False,
        guide=guide,
        margin=settings.margin.value,
        margin_strategy=settings.margin.strategy,
        implementation=settings.implementation,
    )
    if query_ids is None:
        rows = with_positive(negatives.row, scale * negatives.positive, mask)
    else:
        rows = with_positives(negatives.row, negatives.positive.row)
    return global_mean(rows.loss, rows.mask, axis_name, weights)


def _mask_with_positives(labels: Array | None, mask: Array | None, passage_mask: Array, queries: int) -> Array:
    """Return the mask of the queries whose positive is not masked.

    Queries with an out-of-range label stay, so that they make the loss NaN.
    """
    if labels is None:
        valid = passage_mask[:queries]
    else:
        out_of_range = (labels < 0) | (labels >= len(passage_mask))
        valid = out_of_range | jnp.take(passage_mask, labels, mode="clip")
    return valid if mask is None else valid & mask


def _check_same_device(labels: Array, mask: Array | None, queries: int, passages: int, devices: int) -> None:
    if not all(map(is_concrete, (labels, mask))) or queries % devices or passages % devices:
        return
    query_device = np.arange(queries) // (queries // devices)
    positive_device = np.asarray(labels) // (passages // devices)
    remote = (query_device != positive_device) if mask is None else (query_device != positive_device) & np.asarray(mask)
    if remote.any():
        i = int(remote.argmax())
        raise ValueError(
            f"expected each query and its positive on the same device, got query {i} on device {query_device[i]} and "
            f"passage {np.asarray(labels)[i]} on device {positive_device[i]}; group the passages by query"
        )


def _check_any_positive(labels: Array | None, mask: Array | None, passage_mask: Array | None, queries: int) -> None:
    if passage_mask is None or not all(map(is_concrete, (labels, mask, passage_mask))):
        return
    unmasked = np.ones(queries, bool) if mask is None else np.asarray(mask)
    positives = (np.arange(queries) if labels is None else np.asarray(labels))[unmasked]
    if len(positives) and not np.asarray(passage_mask)[positives].any():
        raise ValueError(
            f"expected a passage_mask that keeps the positive of some query, got one that masks the positives of all "
            f"{len(positives)} queries"
        )
