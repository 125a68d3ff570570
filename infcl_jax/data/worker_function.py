"""Functions that worker processes load from a file."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle


class WorkerFunction:
    """Function whose pickle is the path of a temporary file with its state.

    `multiprocessing` sends a worker its arguments through a pipe of 64 KiB. With larger ones, such as the vocabulary of
    a tokenizer, it waits until the worker has imported its modules, so workers would start one after the other.

    The file is deleted with this object, or when the process exits.

    Args:
      function: function to call; `cloudpickle` must be able to pickle it.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._path: Path | None = None
        self._lock = threading.Lock()  # several threads start workers

    def __call__(self, argument: Any) -> Any:
        """Call the function."""
        return self._function(argument)

    def __reduce__(self) -> tuple[Callable[[Path], Any], tuple[Path]]:
        with self._lock:
            if self._path is None:
                descriptor, name = tempfile.mkstemp(prefix="infcl_jax_", suffix=".pickle")
                weakref.finalize(self, Path(name).unlink, missing_ok=True)
                with os.fdopen(descriptor, "wb") as file:
                    cloudpickle.dump(self._function, file)
                self._path = Path(name)
        return _load, (self._path,)


def _load(path: Path) -> Callable[[Any], Any]:
    with path.open("rb") as file:
        return cloudpickle.load(file)
