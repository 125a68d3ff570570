"""Output of the leading process."""

from infcl_jax.distributed import is_lead


def say(line: str) -> None:
    """Print a line, on the leading process only."""
    if is_lead():
        print(line, flush=True)
