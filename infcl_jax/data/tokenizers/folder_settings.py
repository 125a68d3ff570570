"""Settings of tokenizers in the files of Hugging Face and OpenCLIP."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_jax.data.tokenizers.cleaning import OPEN_CLIP_CLEANINGS
from infcl_jax.runtime.file_io import CONFIG_BYTES, read_json

CONFIG_FILE = "tokenizer_config.json"  # of transformers
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MODEL_FILE = "config.json"  # of the model, whose type chooses the class of a tokenizer without one
_OPEN_CLIP_FILE = "open_clip_config.json"

# Classes of transformers 5, whose names may end in "Fast". The first builds BERT's normalizer from the options alone.
_BERT = "(Bert|DistilBert|Electra|ConvBert|MobileBert|MPNet|Funnel|LayoutLM|Lxmert|SqueezeBert|RetriBert|DPR[A-Za-z]+)"
_BERT_TYPES = ("bert", "distilbert", "electra", "convbert", "mobilebert", "mpnet")
_SIGLIP = "Siglip"  # lowercases and removes punctuation
_LOWERS = "(Siglip2|Gemma|Albert)"  # obey `do_lower_case`; Gemma's class is that of published SigLIP 2
_LEFT = "(Siglip2|Gemma|Llama|CodeLlama|Cohere|XLNet)"  # pad on the left unless the files name a side
_BERT_OPTIONS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}  # with their defaults


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


def read_padding_side(folder: Path, default: str | None) -> str:
    """Return the side of the padding, "left" or "right", as transformers chooses it.

    Args:
      folder: folder of the files.
      default: side that `tokenizer.json` names, if it does.

    Raises:
      ValueError: the file names another side, or truncation on the left.
    """
    config, file = _read(folder / CONFIG_FILE), folder / CONFIG_FILE
    side = config.get("padding_side") or default or ("left" if _is_class(folder, _LEFT) else "right")
    if side not in ("left", "right"):
        raise ValueError(f"expected padding_side in {file} to be left or right, got {side!r}")
    if config.get("truncation_side", "right") != "right":
        raise ValueError(
            f"expected truncation_side in {file} to be right, got {config['truncation_side']!r}; remove it to keep the "
            "start of long texts"
        )
    return side


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write options to where `read_pad_token` and `read_padding_side` read them."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=False) + "\n", encoding="utf-8")


def has_class(folder: Path) -> bool:
    """Return whether a folder names the class of its tokenizer."""
    return "tokenizer_class" in _read(folder / CONFIG_FILE)


def read_lower_case(folder: Path) -> bool:
    """Return whether the class of a tokenizer other than BERT's lowercases.

    Raises:
      ValueError: `do_lower_case` is neither true nor false.
    """
    return bool(_flags(folder)["do_lower_case"]) and (not has_class(folder) or _is_class(folder, _LOWERS))


def read_bert_options(folder: Path) -> dict[str, bool | None]:
    """Return the options of BERT's normalizer that transformers changes: those of the folder, else their defaults.

    It is empty where the class takes `tokenizer.json` as it is. A folder without class or type of model has only the
    options that it names.

    Raises:
      ValueError: an option is neither true nor false.
    """
    flags = _flags(folder)
    named = {name: value for name, value in flags.items() if value is not None}
    if _is_class(folder, _BERT) or (
        not has_class(folder) and _read(folder / MODEL_FILE).get("model_type") in _BERT_TYPES
    ):
        return _BERT_OPTIONS | named
    return {} if has_class(folder) else named


def folder_options(folder: Path) -> dict[str, Any]:
    """Return the options of `load_tokenizer` that the files of a folder name, of OpenCLIP or transformers.

    Raises:
      ValueError: see `open_clip_options`; or SigLIP's class keeps the case.
    """
    model = _read(folder / _OPEN_CLIP_FILE)
    model = model.get("model_cfg", model)
    text = model.get("text_cfg") if isinstance(model, dict) else None
    if isinstance(text, dict):
        return open_clip_options(text)
    if not _is_class(folder, _SIGLIP):
        return {}
    if _flags(folder)["do_lower_case"] is False:
        raise ValueError(f"expected do_lower_case of SigLIP in {folder / CONFIG_FILE} to be true, got False; set clean")
    return {"clean": "siglip"}


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
        "clean": lambda value: value in OPEN_CLIP_CLEANINGS,
        "strip_sep_token": lambda value: isinstance(value, bool),
        "context_length": lambda value: type(value) is int and value > 0,
    }
    for name, value in options.items():
        if name not in known or not known[name](value):
            raise ValueError(
                f"expected text_cfg.tokenizer_kwargs with clean of {', '.join(OPEN_CLIP_CLEANINGS)}, strip_sep_token "
                f"and context_length, got {name}={value!r}; load the tokenizer yourself and pass it as tokenizer="
            )
    return ({"clean": clean} if text.get("hf_tokenizer_name") else {}) | options


def _is_class(folder: Path, names: str) -> bool:
    """Return whether the class of a folder's tokenizer is one of a pattern of names."""
    return bool(re.fullmatch(rf"{names}Tokenizer(Fast)?", str(_read(folder / CONFIG_FILE).get("tokenizer_class"))))


def _flags(folder: Path) -> dict[str, bool | None]:
    """Return the options of BERT's class; None for those that are not named."""
    config = _read(folder / CONFIG_FILE)
    for name in _BERT_OPTIONS:
        if config.get(name) not in (None, True, False):
            raise ValueError(f"expected {name} in {folder / CONFIG_FILE} to be true or false, got {config[name]!r}")
    return {name: config.get(name) for name in _BERT_OPTIONS}


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty without one."""
    return read_json(path, limit=CONFIG_BYTES) if path.is_file() else {}
