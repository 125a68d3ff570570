"""Padding token in the files of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

from infcl_jax.file_io import CONFIG_BYTES, read_json

_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def read_pad_token(folder: Path) -> str | None:
    """Return the padding token that a folder names, or None.

    Raises:
      ValueError: a file is not JSON, or its padding token is no string.
    """
    for path in (folder / name for name in _FILES):
        if not path.is_file():
            continue
        token = read_json(path, limit=CONFIG_BYTES).get("pad_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(token, str):
                raise ValueError(f"expected the pad_token in {path} to be a string, got {type(token).__name__}")
            return token
    return None


def write_pad_token(folder: Path, token: str) -> None:
    """Write the padding token to where `read_pad_token` reads it."""
    (folder / _FILES[0]).write_text(json.dumps({"pad_token": token}, ensure_ascii=False) + "\n", encoding="utf-8")
