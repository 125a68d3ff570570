"""Checks of the arguments of batches."""


def process_rows(batch_size: int, process_index: int, process_count: int) -> int:
    """Return the rows of each of `process_count` processes, which share global batches of `batch_size` rows."""
    check_at_least(1, batch_size=batch_size, process_count=process_count)
    if batch_size % process_count:
        raise ValueError(f"batch_size must be a multiple of the {process_count} processes, got {batch_size}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}), got {process_index}")
    return batch_size // process_count


def check_at_least(low: int, **values: float | None) -> None:
    """Check that values are at least `low` or None; messages have their names."""
    for name, value in values.items():
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")
