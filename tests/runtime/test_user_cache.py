"""The user's cache folder."""

from pathlib import Path

import pytest

from infcl_jax.runtime.user_cache import user_cache


@pytest.mark.parametrize(
    ("setting", "folder"),
    [
        (None, "~/.cache/infcl_jax"),
        ("", "~/.cache/infcl_jax"),
        ("relative", "~/.cache/infcl_jax"),
        ("/a", "/a/infcl_jax"),
    ],
)
def test_only_an_absolute_xdg_folder_counts(setting, folder, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if setting is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", setting)
    assert user_cache() == Path(folder)
