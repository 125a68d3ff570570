"""Settings of tokenizers in the files of Hugging Face and OpenCLIP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_jax.data.tokenizers.cleaning import CLEANINGS
from infcl_jax.file_io import CONFIG_BYTES, read_json

CONFIG_FILE = "tokenizer_config.json"  # of transformers
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_OPEN_CLIP_FILE = "open_clip_config.json"
_SIGLIP = ("SiglipTokenizer", "SiglipTokenizerFast")  # classes that lowercase and remove punctuation
_CLEANINGS = tuple(clean for clean in CLEANINGS if clean != "none")  # of OpenCLIP


def read_pad_token(folder: Path) -> str | None:
    """Return the padding token that a folder names, or None.

    Raises:
      ValueError: a file is not JSON, or its padding token is no string.
    """
    for name in (CONFIG_FILE, SPECIAL_TOKENS_FILE):
        token = _read(folder / name).get("pad_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(token, str):
                raise ValueError(
                    f"expected the pad_token in {folder / name} to be a string, got {type(token).__name__}"
                )
            return token
    return None


def write_pad_token(folder: Path, token: str) -> None:
    """Write the padding token to where `read_pad_token` reads it."""
    (folder / CONFIG_FILE).write_text(json.dumps({"pad_token": token}, ensure_ascii=False) + "\n", encoding="utf-8")


def read_lower_case(folder: Path) -> bool | None:
    """Return `do_lower_case` of transformers in a folder; None without it.

    Raises:
      ValueError: it is neither true nor false.
    """
    value = _read(folder / CONFIG_FILE).get("do_lower_case")
    if value not in (None, True, False):
        raise ValueError(f"expected do_lower_case in {folder / CONFIG_FILE} to be true or false, got {value!r}")
    return value


def folder_options(folder: Path) -> dict[str, Any]:
    """Return the options of `load_tokenizer` that the files of a folder name, of OpenCLIP or transformers.

    Raises:
      ValueError: see `open_clip_options`.
    """
    model = _read(folder / _OPEN_CLIP_FILE)
    model = model.get("model_cfg", model)
    text = model.get("text_cfg") if isinstance(model, dict) else None
    if isinstance(text, dict):
        return open_clip_options(text)
    return {"clean": "canonicalize"} if _read(folder / CONFIG_FILE).get("tokenizer_class") in _SIGLIP else {}


def open_clip_options(text: Mapping[str, Any], clean: str = "whitespace") -> dict[str, Any]:
    """Return the options of `load_tokenizer` for the `text_cfg` of OpenCLIP's configuration.

    Args:
      text: the `text_cfg`.
      clean: default cleaning of a tokenizer of transformers.

    Raises:
      ValueError: it has an option that is not supported.
    """
    options = dict(text.get("tokenizer_kwargs") or {})
    if text.get("tokenizer_mode"):
        options["tokenizer_mode"] = text["tokenizer_mode"]
    known = {
        "clean": lambda value: value in _CLEANINGS,
        "strip_sep_token": lambda value: isinstance(value, bool),
        "context_length": lambda value: type(value) is int and value > 0,
    }
    for name, value in options.items():
        if name not in known or not known[name](value):
            raise ValueError(
                f"expected text_cfg.tokenizer_kwargs with clean of {', '.join(_CLEANINGS)}, strip_sep_token and "
                f"context_length, got {name}={value!r}; load the tokenizer yourself and pass it as tokenizer="
            )
    return ({"clean": clean} if text.get("hf_tokenizer_name") else {}) | options


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty without one."""
    return read_json(path, limit=CONFIG_BYTES) if path.is_file() else {}
