"""Type checker of the shapes in signatures.

The import hook of `conftest.py` applies it to backends, and `repository/test_signatures.py` to public functions.
"""

import inspect
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import beartype
import numpy as np
from beartype.door import is_bearable
from beartype.vale import Is
from jaxtyping import AbstractArray, jaxtyped

_ROOT = Path(__file__).parents[1]
# The first four raise ValueError for arguments of other shapes. Triton compiles its kernels from their source.
_LEFT_OUT = {
    *("models/clip", "ops/pairwise/lse/api", "ops/pairwise/checks", "ops/pairwise/sigmoid/api"),
    *(f"ops/pairwise/{folder}triton_kernels" for folder in ("", "lse/", "sigmoid/", "distillation/")),
}
BACKENDS = [
    ".".join(path.relative_to(_ROOT).with_suffix("").parts)
    for folder in ("models", "ops")
    for path in (_ROOT / "infcl_jax" / folder).rglob("*.py")
    if str(path.relative_to(_ROOT / "infcl_jax").with_suffix("")) not in _LEFT_OUT
]


def checked_backend(function):
    """Apply `checked` except to nested functions.

    Every call of the outer function would decorate them anew, which takes 2 ms.
    """
    return function if "<locals>" in function.__qualname__ else checked(function)


def checked(function):
    """Check the arguments and results whose annotations have shapes; mypy checks the others."""
    hints = {name: _shapes(hint) for name, hint in function.__annotations__.items()}
    if all(hint is Any for hint in hints.values()):
        return function
    function.__annotations__ = hints
    return beartype.beartype(function)


def _shapes(hint):
    """Return a hint for the shapes in `hint`; Any without shapes.

    NumPy arrays match, too. The fields of a named tuple are checked among themselves only: a function may return
    a block of other sizes.
    """
    if not hasattr(hint, "_fields"):
        return _with_numpy(hint) if _has_shapes(hint) else Any
    fields = {name: _shapes(field) for name, field in get_type_hints(hint, include_extras=True).items()}

    def match(value):
        with jaxtyped("context"):
            return all(is_bearable(getattr(value, name), field) for name, field in fields.items())

    return Annotated[hint, Is[match]]


def _is_shape(hint):
    return inspect.isclass(hint) and issubclass(hint, AbstractArray)


def _has_shapes(hint):
    return _is_shape(hint) or any(map(_has_shapes, get_args(hint)))


def _with_numpy(hint):
    """Accept NumPy arrays for JAX arrays, as JAX does."""
    if _is_shape(hint):
        return hint.dtype[hint.array_type | np.ndarray, hint.dim_str]
    origin, arguments = get_origin(hint), tuple(map(_with_numpy, get_args(hint)))
    return (Union if origin is UnionType else origin)[arguments] if arguments else hint
