"""Save of a step whose evaluation or callback fails."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

from infcl_jax.runtime.exit_codes import USER_ERRORS
from infcl_jax.runtime.processes import channel
from infcl_jax.training.compiled_step import OutOfMemory

_ALL_SECONDS = 10  # between the failures of two processes that have one cause
_failures = itertools.count()


@contextlib.contextmanager
def keep_step(step: int, save: Callable[[], bool], batch_size: int | None = None) -> Iterator[None]:
    """Save a step if the body fails, and say so in the error.

    A save needs all processes. If another one does not fail within ten seconds, it waits in a collective of the body,
    and nothing is saved.

    Args:
      step: finished step.
      save: function that saves the step, unless it is saved, and returns whether it is.
      batch_size: `evaluation.batch_size` if the body is an evaluation, whose user errors become a `ValueError` of one
        line; None: the error gets a note.

    Raises:
      ValueError, OutOfMemory: the evaluation failed.
    """
    try:
        yield
    except Exception as error:
        saved = _all_fail(step) and save()
        state = f"step {step}, which is {'' if saved else 'not '}saved"
        advice = f"the same command continues from {'there' if saved else 'the last checkpoint'}"
        if batch_size is not None and "RESOURCE_EXHAUSTED" in str(error):
            reason = f"the device ran out of memory; lower evaluation.batch_size from {batch_size}"
            raise OutOfMemory(f"evaluation failed after {state}: {reason}; {advice}") from error
        if batch_size is not None and isinstance(error, USER_ERRORS):
            raise ValueError(f"evaluation failed after {state}: {error}; {advice}") from error
        error.add_note(f"failed after {state}; {advice}")
        raise


def _all_fail(step: int) -> bool:
    """Return whether all processes fail after this step."""
    messages, failure = channel(), next(_failures)
    return messages is None or messages.meets(f"failed/{step}/{failure}", _ALL_SECONDS)
