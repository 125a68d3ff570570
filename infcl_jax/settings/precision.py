"""Precision of a run: the dtype of its towers."""

from typing import Any

from infcl_jax.ops.common.gpu import target_device
from infcl_jax.settings.overrides import parse_overrides

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
PRECISIONS = ("auto", *DTYPES)


def check_precision(precision: str, overrides: str) -> None:
    """Check that only one setting chooses the dtype of the towers.

    Args:
      precision: setting `precision` of a run.
      overrides: setting `model_overrides` of a run.

    Raises:
      ValueError: `overrides` has a dtype, and `precision` is not "auto".
    """
    dtype = parse_overrides(overrides).get("dtype")
    if precision != "auto" and dtype is not None:
        raise ValueError(
            f"expected no dtype in model_overrides with precision={precision!r}, got dtype={dtype}; leave one of both "
            "out"
        )


def resolved_precision(precision: str, overrides: str) -> str:
    """Return the precision that "auto" stands for on the default device.

    A dtype in `overrides` takes the place of the precision, which then remains "auto". For the arguments see
    `check_precision`.
    """
    if precision != "auto" or "dtype" in parse_overrides(overrides):
        return precision
    return "fp32" if target_device().platform == "cpu" else "bf16"


def precision_of_overrides(overrides: str) -> dict[str, str]:
    """Return the change of the precision to "auto", where a dtype in `overrides` takes its place; else none."""
    return {"precision": "auto"} if "dtype" in parse_overrides(overrides) else {}


def model_changes(precision: str, overrides: str) -> dict[str, Any]:
    """Return the overrides of a run's model, with the dtype of its precision.

    For the arguments see `check_precision`.

    Raises:
      ValueError: an override is not of the form key=value.
    """
    resolved = resolved_precision(precision, overrides)
    dtype = {} if resolved == "auto" else {"dtype": DTYPES[resolved]}
    return dtype | parse_overrides(overrides)
