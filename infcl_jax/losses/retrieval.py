"""One-directional InfoNCE with hard negatives, as used in dense text retrieval."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from infcl_jax.losses.batch import Array, AxisName, checked_scalar, global_mean, over_mesh
from infcl_jax.pairwise import pairwise_lse
from infcl_jax.pairwise.checks import check_label_range


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
      mask: bool `[bq]`, False for queries that do not exist.
      passage_mask: bool `[bp]`, False for passages that do not exist.
      implementation: see `pairwise_lse`.

    Returns:
      Scalar in fp32 (fp64 for fp64 features), the same on every device; NaN if a traced label is out of range.

    Raises:
      ValueError: shapes, dtypes or labels do not fit.
    """
    if mesh is not None and labels is None and query.shape[0] != passage.shape[0]:
        raise ValueError(
            f"expected labels when there are more passages than queries on a mesh, got {query.shape[0]} queries and "
            f"{passage.shape[0]} passages"
        )
    if mesh is not None and labels is not None:
        check_label_range(labels, passage.shape[0])

    def loss(axis_name_here: AxisName | None, sharded: Any, scale: Array) -> Array:
        query, passage, labels, mask, passage_mask = sharded
        if mesh is not None and labels is not None:
            labels = labels.astype(jnp.int32) - lax.axis_index(axis_name_here) * passage.shape[0]
        lse = pairwise_lse(
            query,
            passage,
            scale,
            axis_name=axis_name_here,
            labels=labels,
            x_mask=mask,
            y_mask=passage_mask,
            columns=False,
            implementation=implementation,
        )
        return global_mean(lse.row - scale * lse.positive, mask, axis_name_here)

    scale = checked_scalar("scale", scale, query)
    sharded = (query, passage, labels, mask, passage_mask)
    return over_mesh(loss, sharded, scale, axis_name=axis_name, mesh=mesh)
