"""Positives by id of an implementation on one device, against `dense` in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from gpus import ALONE

from infcl_jax import pairwise_lse


def _value(args, implementation, exclude, multi_positive, ids, masks):
    x, y, x_scale, y_scale = args
    result = pairwise_lse(
        *(x, y, x_scale, y_scale),
        positives="exclude" if exclude else "include",
        multi_positive=multi_positive,
        x_ids=ids[0],
        y_ids=ids[1],
        x_mask=masks[0],
        y_mask=masks[1],
        columns=x_scale.ndim == 0 or y_scale is not None,
        implementation=implementation,
    )
    outputs = [result.row, result.col, *result.positive.row[:2], *(result.positive.col or (None, None))[:2]]
    value = jnp.zeros_like(result.row, shape=())
    for i, output in enumerate(a for a in outputs if a is not None):
        weights = np.cos((i + 1) * np.arange(len(output))).astype(output.dtype)
        value += jnp.where(jnp.isfinite(output), weights * output, jnp.zeros_like(output)).sum()
    return value


def check_ids(
    implementation, scale, *, exclude, multi_positive, bx=100, by=140, dim=40, dtype=jnp.bfloat16, tolerance=1e-2
):
    """Check a weighted sum of all results, and its gradients.

    Rows and columns have groups of 1 to 40 members, ids that the other side lacks, and masks with NaN.

    Args:
      implementation: name of the implementation.
      scale: "shared", "per_sample", or "rows" for per-sample scales without columns.
      exclude: whether positives are excluded from the sums.
      multi_positive: "mean" or "any".
      bx: number of rows.
      by: number of columns.
      dim: number of features.
      dtype: dtype of the features.
      tolerance: largest relative error of a gradient of features.
    """
    rng = np.random.default_rng(5)
    x, y = oracle.features("random", bx, by, dim, dtype)
    ids = [np.minimum(rng.integers(0, 90, n), rng.choice([3, 90], n)).astype(np.int32) for n in (bx, by)]
    masks = [rng.random(n) < 0.9 for n in (bx, by)]
    x_scale, y_scale = {
        "shared": (np.float32(14.3), None),
        "per_sample": (rng.uniform(5, 60, bx).astype(np.float32), rng.uniform(5, 60, by).astype(np.float32)),
        "rows": (rng.uniform(5, 60, bx).astype(np.float32), None),
    }[scale]
    settings = (exclude, multi_positive, ids, masks)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (x, y, x_scale, y_scale))
        grad = jax.jit(jax.value_and_grad(lambda args: _value(args, "dense", *settings)))
        want, expected = jax.device_get(grad(wide))
    for array, mask in zip((x, y), masks, strict=True):
        array[~mask] = np.nan
    with jax.sharding.use_abstract_mesh(ALONE):
        grad = jax.jit(jax.value_and_grad(lambda args: _value(args, implementation, *settings)))
        got, gradients = jax.device_get(grad((x, y, x_scale, y_scale)))
    assert got == pytest.approx(float(want), rel=1e-5)
    # The gradient of a shared scale is a sum over dS in bf16, whose terms cancel.
    tolerances = [tolerance, tolerance, *([5 * tolerance] if scale == "shared" else [1e-4] * 2)]
    for g, w, bound in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), tolerances, strict=False):
        assert oracle.relative_error(g, w) <= bound
