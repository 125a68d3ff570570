"""Exact contrastive training of CLIP-like models with very large batches in JAX/Flax.

Names are imported on first use. The whole library takes seconds to import, and a process handles stop signals before.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

from infcl_jax.runtime.printable import escape_log_records

# Module of each public name; a name of the package itself is a module.
_MODULES = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
_PACKAGES = ("grad_cache", "losses", "ops")  # further ones that `import infcl_jax` alone makes available
__all__ = sorted(_MODULES)

escape_log_records(__name__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    module = __name__ if name in _PACKAGES else _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module == __name__:
        return importlib.import_module(f"{module}.{name}")
    names = vars(importlib.import_module(module))
    return names[name] if name in names else importlib.import_module(f"{module}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES, "__version__"})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"
