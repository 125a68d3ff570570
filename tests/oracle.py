"""Features of every kind, and the CLIP loss with gradients in NumPy fp64."""

import jax
import jax.numpy as jnp
import numpy as np

from infcl_jax.runtime.mesh import data_mesh

KINDS = ("random", "aligned", "duplicates", "adversarial")


def mesh_of(devices: int):
    return data_mesh(jax.devices()[:devices])


def unit(a: np.ndarray) -> np.ndarray:
    return a / np.linalg.norm(a, axis=1, keepdims=True)


def features(kind: str, bx: int, by: int, dim: int, dtype=np.float32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Row and column features `[bx, dim]`, `[by, dim]`, normalized in fp64, in `dtype`."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(bx, dim)), rng.normal(size=(by, dim))
    rows = min(bx, by)
    if kind == "aligned":
        y[:rows] = unit(x[:rows]) + 1e-3 * y[:rows]
    elif kind == "duplicates":
        x, y = x[np.arange(bx) % 3], y[np.arange(by) % 5]
    elif kind == "adversarial":  # some rows and columns are opposite to everything: e^-100 against everyone's e^70
        x, y = 0.05 * unit(x), 0.05 * unit(y)
        x[:, 0] += 1.0
        y[:, 0] += 1.0
        x[::5, 0] -= 2.0
        y[3::7, 0] -= 2.0
    dtype = jnp.dtype(dtype)
    return unit(x).astype(dtype), unit(y).astype(dtype)


def log_sum_exp(z: np.ndarray, axis: int) -> np.ndarray:
    top = z.max(axis, keepdims=True)
    return np.squeeze(top, axis) + np.log(np.exp(z - top).sum(axis))


def masked_retrieval(bx=50, by=80, dim=20, scale=20.0, dtype=np.float32):
    """Retrieval loss with NaN and infinity in masked queries and passages.

    Returns:
      Positional and keyword arguments of `retrieval_loss`, and a function that checks its value and gradients.
    """
    rng = np.random.default_rng(0)
    query, passage = features("random", bx, by, dim, dtype)
    labels, mask, passage_mask = rng.integers(0, by, bx), rng.random(bx) < 0.8, rng.random(by) < 0.7
    kept = mask & passage_mask[labels]
    moved = np.cumsum(passage_mask) - 1  # rows of the passages that are left
    loss, gradients = retrieval(query[kept], passage[passage_mask], scale, moved[labels[kept]])
    query[~mask], passage[~passage_mask] = np.nan, np.inf

    def check(got_loss, got, tolerance):
        np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
        for g, rows, want in zip(got, (kept, passage_mask), gradients, strict=False):
            assert relative_error(np.asarray(g)[rows], want) <= tolerance
            assert not np.any(np.asarray(g)[~rows])
        np.testing.assert_allclose(got[2], gradients[2], rtol=tolerance)

    options = {"labels": labels.astype(np.int32), "mask": mask, "passage_mask": passage_mask}
    return (query, passage, np.float32(scale)), options, check


def clip(image: np.ndarray, text: np.ndarray, scale: float) -> tuple[float, tuple]:
    """Loss, and its gradients over image features, text features and scale, in fp64."""
    x, y, scale = np.asarray(image, np.float64), np.asarray(text, np.float64), float(scale)
    s, b = x @ y.T, len(x)
    row, col, positive = log_sum_exp(scale * s, 1), log_sum_exp(scale * s, 0), np.diagonal(s)
    loss = ((row + col) / 2 - scale * positive).mean()
    d_logits = (np.exp(scale * s - row[:, None]) + np.exp(scale * s - col[None, :])) / (2 * b) - np.eye(b) / b
    d_s = scale * d_logits
    return loss, (d_s @ y, d_s.T @ x, (d_logits * s).sum())


def siglip(image, text, scale, bias, ids=None):
    """Sigmoid loss and its gradients in fp64 (Zhai et al., eq. 1); `ids` of the rows of both sides."""
    x, y = np.asarray(image, np.float64), np.asarray(text, np.float64)
    s, b = x @ y.T, len(x)
    z = 2.0 * (np.eye(b) if ids is None else ids[:, None] == ids[None, :]) - 1
    margin = z * (scale * s + bias)
    d_logits = -z * np.exp(-np.logaddexp(0, margin)) / b
    d_s = scale * d_logits
    loss = np.logaddexp(0, -margin).sum() / b
    return loss, (d_s @ y, d_s.T @ x, (d_logits * s).sum(), d_logits.sum())


def retrieval(query, passage, scale, labels):
    """One-directional loss, and its gradients over query features, passage features and scale, in fp64."""
    x, y = np.asarray(query, np.float64), np.asarray(passage, np.float64)
    s, rows = x @ y.T, np.arange(len(x))
    row = log_sum_exp(scale * s, 1)
    d_logits = np.exp(scale * s - row[:, None]) / len(x)
    d_logits[rows, labels] -= 1 / len(x)
    loss = (row - scale * s[rows, labels]).mean()
    return loss, (scale * d_logits @ y, scale * d_logits.T @ x, (d_logits * s).sum())


def distillation(student, teacher, scale, teacher_scale, kept=None, weights=None):
    """Both losses and the gradients of the divergence over the student's features and scale, in fp64.

    `kept` is bool `[b]`. Returns the CLIP loss, the divergence and its gradients, and the sums of the absolute terms of
    the gradients.
    """
    x, y, tx, ty = (np.asarray(a, np.float64) for a in (*student, *teacher))
    kept = np.ones(len(x), bool) if kept is None else kept
    w = np.where(kept, 1.0 if weights is None else weights, 0.0)
    w = w / max(w.sum(), 1e-300) / 2
    x, y, tx, ty = (np.where(kept[:, None], a, 0) for a in (x, y, tx, ty))
    s, pairs = x @ y.T, np.outer(kept, kept)
    z, t = np.where(pairs, scale * s, -1e9), np.where(pairs, teacher_scale * tx @ ty.T, -1e9)
    clip, divergence, d_z, size = 0.0, 0.0, np.zeros_like(s), np.zeros_like(s)
    for axis in (0, 1):
        row_w = np.expand_dims(w, axis)
        log_q, log_p = (a - np.expand_dims(log_sum_exp(a, axis), axis) for a in (z, t))
        p, q = np.where(pairs, np.exp(log_p), 0), np.where(pairs, np.exp(log_q), 0)
        clip -= (row_w * np.where(np.eye(len(x)) * pairs, log_q, 0)).sum()
        divergence += (row_w * p * (log_p - log_q)).sum()
        d_z, size = d_z + row_w * (q - p), size + row_w * (q + p)
    gradients = scale * d_z @ y, scale * d_z.T @ x, (d_z * s).sum()
    sizes = scale * size @ np.abs(y), scale * size.T @ np.abs(x), (size * np.abs(s)).sum()
    return clip, divergence, gradients, sizes


def relative_error(got, expected) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-300))


def absolute_error(got, expected) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - np.asarray(expected, np.float64)))


def attention(query, key, value, causal):
    """One loop per sample, head and query, in float64 NumPy."""
    q, k, v = (np.asarray(a, np.float64) for a in (query, key, value))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = slice(t + 1) if causal else slice(None)
        weights = np.exp(k[b, seen, h] @ q[b, t, h] / np.sqrt(q.shape[-1]))
        out[b, t, h] = weights @ v[b, seen, h] / weights.sum()
    return out
