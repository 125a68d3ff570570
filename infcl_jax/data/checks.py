"""Checks of the arguments of batches."""

from __future__ import annotations


def process_rows(batch_size: int, process_index: int, process_count: int) -> int:
    """Return the number of rows of a global batch that each process has.

    Args:
      batch_size: global batch size, over all processes.
      process_index: index of this process.
      process_count: number of processes that share each batch.

    Raises:
      ValueError: the batch size is not a multiple of the number of processes, or an argument is out of range.
    """
    check_at_least(1, batch_size=batch_size, process_count=process_count)
    if batch_size % process_count:
        raise ValueError(f"batch_size must be a multiple of the {process_count} processes, got {batch_size}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}), got {process_index}")
    return batch_size // process_count


def check_at_least(low: int, **values: float | None) -> None:
    """Check that values are at least a bound or None.

    Raises:
      ValueError: a value is below `low`; the message has its name.
    """
    for name, value in values.items():
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")
