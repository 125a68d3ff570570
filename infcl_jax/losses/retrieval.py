"""One-directional InfoNCE with hard negatives, as used in dense text retrieval."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from infcl_jax.checks import is_known
from infcl_jax.losses.batch import (
    Array,
    AxisName,
    axis_and_devices,
    checked_scalar,
    cross_entropy,
    global_mean,
    over_mesh,
)
from infcl_jax.ops.pairwise_lse import pairwise_lse
from infcl_jax.ops.pairwise_lse.checks import check_label_range, checked_mask


def retrieval_loss(
    query: Array,
    passage: Array,
    scale: Array | float,
    *,
    labels: Array | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Array | None = None,
    passage_mask: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Mean over queries of `row_i - scale * s_{i, labels_i}`: every query against all passages of the global batch.

    Passages that are no query's positive are hard negatives for all. Karpukhin et al., "Dense Passage Retrieval",
    section 3.2; Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", eq. 1.

    Args:
      query: `[bq, D]` features, bf16, fp16, fp32 or fp64.
      passage: `[bp, D]` features of the same dtype, `bp >= bq` unless `labels` are given.
      scale: scalar that multiplies the similarities.
      labels: int `[bq]`, the row of `passage` that answers each query; row i by default, for which the two sides must
        be equally long on a mesh. A query and its passage must be on the same device: passages grouped by query
        (`labels = arange(bq) * passages_per_query`) are. With `axis_name` alone the labels index into this device's
        rows, with `mesh` into the global array.
      axis_name: as in `clip_loss`.
      mesh: as in `clip_loss`.
      mask: bool `[bq]`, False for masked queries (padding), which are not in the mean.
      passage_mask: bool `[bp]`, False for masked passages, which are in no sum. A query whose positive passage is
        masked has no loss and leaves the mean. Masked features may hold anything, NaN included.
      implementation: see `pairwise_lse`.

    Returns:
      Scalar in fp32 (fp64 for fp64 features), the same on every device; 0 if no query is left. If a traced label is out
      of range, loss and gradients are NaN.

    Raises:
      ValueError: shapes, dtypes, labels or masks do not fit; labels and masks are known (not traced) and mask the
        positive of every query, or place a positive on another device; `axis_name` is missing inside `shard_map`.
    """
    mask = checked_mask("mask", mask, query.shape[0])
    passage_mask = checked_mask("passage_mask", passage_mask, passage.shape[0])
    if mesh is not None and labels is None and query.shape[0] != passage.shape[0]:
        raise ValueError(
            f"expected labels when there are more passages than queries on a mesh, got {query.shape[0]} queries and "
            f"{passage.shape[0]} passages"
        )
    if labels is not None:
        check_label_range(labels, passage.shape[0], mask)
    if mesh is not None and labels is not None:
        _check_same_device(labels, mask, query.shape[0], passage.shape[0], axis_and_devices(mesh, axis_name)[1])
    _check_positives_left(labels, mask, passage_mask, query.shape[0])
    settings = _Settings(implementation, global_labels=mesh is not None)
    scale = checked_scalar("scale", scale, query)
    sharded = (query, passage, labels, mask, passage_mask)
    return over_mesh(_loss, settings, sharded, scale, axis_name=axis_name, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Static settings of one call.

    Attributes:
      implementation: see `pairwise_lse`.
      global_labels: whether labels index into the passages of all devices.
    """

    implementation: str | None
    global_labels: bool


def _loss(settings: _Settings, axis_name: AxisName | None, sharded: Any, scale: Array) -> Array:
    query, passage, labels, mask, passage_mask = sharded
    if labels is not None and settings.global_labels:
        labels = labels.astype(jnp.int32) - lax.axis_index(axis_name) * passage.shape[0]
    if passage_mask is not None:
        mask = _with_positive(labels, mask, passage_mask, query.shape[0])
    negatives = pairwise_lse(
        query,
        passage,
        scale,
        axis_name=axis_name,
        positives="exclude",
        labels=labels,
        x_mask=mask,
        y_mask=passage_mask,
        columns=False,
        implementation=settings.implementation,
    )
    return global_mean(cross_entropy(negatives.row, scale * negatives.positive), mask, axis_name)


def _with_positive(labels: Array | None, mask: Array | None, passage_mask: Array, queries: int) -> Array:
    """Mask of the queries whose positive is not masked, those with a label out of range included."""
    if labels is None:
        kept = passage_mask[:queries]
    else:
        out_of_range = (labels < 0) | (labels >= len(passage_mask))
        kept = out_of_range | jnp.take(passage_mask, labels, mode="clip")
    return kept if mask is None else kept & mask


def _check_same_device(labels: Array, mask: Array | None, queries: int, passages: int, devices: int) -> None:
    if not all(map(is_known, (labels, mask))) or queries % devices or passages % devices:
        return
    own, other = np.arange(queries) // (queries // devices), np.asarray(labels) // (passages // devices)
    apart = (own != other) if mask is None else (own != other) & np.asarray(mask)
    if apart.any():
        i = int(apart.argmax())
        raise ValueError(
            f"expected each query and its positive on the same device, got query {i} on device {own[i]} and passage "
            f"{np.asarray(labels)[i]} on device {other[i]}; group the passages by query"
        )


def _check_positives_left(labels: Array | None, mask: Array | None, passage_mask: Array | None, queries: int) -> None:
    if passage_mask is None or not all(map(is_known, (labels, mask, passage_mask))):
        return
    kept = np.ones(queries, bool) if mask is None else np.asarray(mask)
    positives = (np.arange(queries) if labels is None else np.asarray(labels))[kept]
    if len(positives) and not np.asarray(passage_mask)[positives].any():
        raise ValueError(
            f"expected a passage_mask that keeps the positive of some query, got one that masks the positives of all "
            f"{len(positives)} queries"
        )
