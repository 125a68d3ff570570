"""Log line about arrays that the Hopper kernels do not support."""

import functools
import logging

import jax

_logger = logging.getLogger(__name__)


@functools.cache
def log_fallback(op: str, array: str, supported: str) -> None:
    """Log once per process and array that an op runs without its Hopper kernels.

    It is a warning on a GPU. Programs that are traced elsewhere for a described GPU are only planned.

    Args:
      op: name of the op.
      array: shape and dtype of its argument.
      supported: shapes and dtypes that its kernels support.
    """
    level = logging.WARNING if jax.default_backend() == "gpu" else logging.INFO
    _logger.log(level, "%s of %s runs without Hopper kernels; they support %s", op, array, supported)
