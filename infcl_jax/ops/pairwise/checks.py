"""Input validation of pairwise ops at trace time.

Errors are one line: what was expected and what was got.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infcl_jax.ops.common.checks import is_concrete
from infcl_jax.ops.pairwise.base import Array, AxisName, accumulation_dtype


def check_features(x: Array, y: Array) -> None:
    """Raise `ValueError` unless the features are valid matrices.

    `x` and `y` must be non-empty, floating, and of the same dtype and width.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"expected features [bx, D] and [by, D] with the same D, got {x.shape} and {y.shape}")
    if 0 in x.shape or 0 in y.shape:
        raise ValueError(f"expected at least one row, one column and one feature, got {x.shape} and {y.shape}")
    if x.dtype != y.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"expected features of one floating dtype, got {x.dtype} and {y.dtype}; cast them first")


def check_axis(axis_name: AxisName | None, *features: Array) -> None:
    """Check the mesh axes over which the batch is sharded.

    Args:
      axis_name: axis (or axes) of an enclosing `shard_map`; `()` for no axis; None for one device.
      features: arrays of the batch. Under `check_vma=True` their types show whether they vary over an axis.

    Raises:
      ValueError: the axis does not exist, or it is None although the features vary over an axis.
    """
    if axis_name is None:
        if varying := sorted(set().union(*(jax.typeof(a).manual_axis_type.varying for a in features))):
            raise ValueError(
                f"expected axis_name for features that are sharded over the mesh axes {varying}, got None; pass "
                f"axis_name={varying[0] if len(varying) == 1 else tuple(varying)!r}, or axis_name=() to compare each "
                "device's rows with its own columns only"
            )
        return
    try:
        lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"expected axis_name to be an axis of an enclosing shard_map, got {axis_name!r}; call this inside a "
            "shard_map over that axis, or leave axis_name out (one device)"
        ) from None


def checked_labels(labels: Array | None, x_rows: int, y_rows: int, mask: Array | None = None) -> Array:
    """Return labels as int32 `[x_rows]`, `arange(x_rows)` by default.

    Raises:
      ValueError: labels are not integers of that shape, or a concrete label of an unmasked row is out of range.
    """
    if labels is None:
        if y_rows < x_rows:
            raise ValueError(f"expected labels, or at least as many rows in y as in x, got {x_rows} and {y_rows} rows")
        return jnp.arange(x_rows, dtype=jnp.int32)
    if labels.shape != (x_rows,) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"expected integer labels of shape ({x_rows},), got {labels.dtype}{list(labels.shape)}")
    _check_label_range(labels, y_rows, mask)
    return jnp.asarray(labels).astype(jnp.int32)


def _check_label_range(labels: Array, y_rows: int, mask: Array | None = None) -> None:
    """Raise `ValueError` if a concrete label is outside `[0, y_rows)`.

    Labels of masked rows are not checked.
    """
    if not all(map(is_concrete, (labels, mask))):
        return
    values = np.asarray(labels)  # NumPy, because jax.numpy would trace even this under jit
    values = values if mask is None else values[np.asarray(mask)]
    if values.size and (values.min() < 0 or values.max() >= y_rows):
        raise ValueError(
            f"expected labels in [0, {y_rows}), the rows of the other side, got values {values.min()} to {values.max()}"
        )


def checked_ids(
    ids: dict[str, Array | None], rows: tuple[int, int], labels: Array | None = None
) -> tuple[Array | None, Array | None]:
    """Return the ids of both sides as arrays, or None for both without ids.

    Call this before any `jit`, which cuts int64 to 32 bits silently.

    Args:
      ids: ids of the rows and of the columns by their argument names.
      rows: number of rows and of columns.
      labels: positives by label, which exclude ids.

    Raises:
      ValueError: ids are not int32 of shape `[n]` or `[n, 2]`, one side has none, or labels are given too.
    """
    (x_name, x_ids), (y_name, y_ids) = ids.items()
    if x_ids is None and y_ids is None:
        return None, None
    if x_ids is None or y_ids is None:
        raise ValueError(f"expected {x_name} and {y_name}, got only {y_name if x_ids is None else x_name}; pass both")
    if labels is not None:
        raise ValueError(f"expected labels, or {x_name} and {y_name}, got all of them; leave the labels out")
    for (name, array), count in zip(ids.items(), rows, strict=True):
        if array.shape not in ((count,), (count, 2)) or array.dtype != jnp.int32:
            hint = "; pass 64-bit ids as ids.view(np.int32).reshape(-1, 2)" if array.dtype.itemsize > 4 else ""
            got = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"expected {name} to be int32 of shape ({count},) or ({count}, 2), got {got}{hint}")
    if x_ids.ndim != y_ids.ndim:
        raise ValueError(f"expected {x_name} and {y_name} of the same width, got {x_ids.shape} and {y_ids.shape}")
    return jnp.asarray(x_ids), jnp.asarray(y_ids)


def checked_mask(name: str, mask: Array | None, rows: int) -> Array | None:
    """Return the mask as an array.

    Raises:
      ValueError: the mask is not bool of shape `[rows]`.
    """
    if mask is not None and (mask.shape != (rows,) or mask.dtype != bool):
        raise ValueError(f"expected {name} to be bool of shape ({rows},), got {mask.dtype}{list(mask.shape)}")
    return None if mask is None else jnp.asarray(mask)


def checked_scales(
    x_scale: Array | float, y_scale: Array | float | None, x: Array, y: Array, columns: bool
) -> tuple[Array, Array | None]:
    """Return both scales in the format of `base.Block`.

    A shared scale is a scalar and `y_scale` is None; other scales are vectors.

    Raises:
      ValueError: a scale is neither a scalar nor one value per sample, or has no effect.
    """
    if y_scale is not None and not columns:
        raise ValueError("expected no y_scale with columns=False, got one; leave one of them out")
    x_scale = _checked_scale("x_scale", x_scale, x)
    if y_scale is None and x_scale.ndim == 0:
        return x_scale, None
    per_row = jnp.broadcast_to(x_scale, x.shape[:1])
    if not columns:
        return per_row, None
    y_scale = _checked_scale("y_scale", x_scale if y_scale is None else y_scale, y)
    return per_row, jnp.broadcast_to(y_scale, y.shape[:1])


def _checked_scale(name: str, scale: Array | float, features: Array) -> Array:
    scale = jnp.asarray(scale)
    if scale.shape not in ((), features.shape[:1]):
        raise ValueError(f"expected {name} to be a scalar or of shape ({features.shape[0]},), got {scale.shape}")
    return scale.astype(accumulation_dtype(features.dtype))
