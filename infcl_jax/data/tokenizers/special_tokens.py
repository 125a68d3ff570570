"""Padding token in the files of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def read_pad_token(folder: Path) -> str | None:
    """Return the padding token that a folder names, or None.

    Raises:
      ValueError: a file is not JSON.
    """
    for path in (folder / name for name in _FILES):
        if not path.is_file():
            continue
        try:
            token = json.loads(path.read_text(encoding="utf-8")).get("pad_token")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"expected a JSON object in {path}, got {error}") from None
        if token is not None:
            return token["content"] if isinstance(token, dict) else token
    return None


def write_pad_token(folder: Path, token: str) -> None:
    """Write the padding token to where `read_pad_token` reads it."""
    (folder / _FILES[0]).write_text(json.dumps({"pad_token": token}, ensure_ascii=False) + "\n", encoding="utf-8")
