"""Cache folder of the user."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the library's folder in `XDG_CACHE_HOME`, or else in `~/.cache`.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG Base Directory Specification demands. The `~` is not expanded,
    since a user without a home directory has none.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path("~/.cache")) / "infcl_jax"
