"""Settings of tokenizers in the files of Hugging Face and OpenCLIP."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_jax.data.tokenizers.base import OPEN_CLIP_CLEANINGS
from infcl_jax.runtime.file_io import CONFIG_BYTES, read_json

CONFIG_FILE = "tokenizer_config.json"  # of transformers
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MODEL_FILE = "config.json"  # of the model, whose type chooses the class of a tokenizer without one
_OPEN_CLIP_FILE = "open_clip_config.json"

# Classes of transformers 5, whose names may end in "Fast". The first builds BERT's normalizer from the options alone.
_BERT = "(Bert|DistilBert|Electra|ConvBert|MobileBert|MPNet|Funnel|LayoutLM|Lxmert|SqueezeBert|RetriBert|DPR[A-Za-z]+)"
_BERT_TYPES = ("bert", "distilbert", "electra", "convbert", "mobilebert", "mpnet")
_SIGLIP = "Siglip"  # lowercases and removes punctuation
_LOWERS = "(Siglip2|Gemma|Albert)"  # obey `do_lower_case`; published SigLIP 2 has Gemma's class
_LEFT = "(Siglip2|Gemma|Llama|CodeLlama|Cohere|XLNet)"  # pad on the left unless the files name a side
_BERT_OPTIONS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}  # with their defaults


class TokenizerFolder:
    """Options of a tokenizer in the files of its folder, of Hugging Face and OpenCLIP.

    Raises:
      ValueError: a file is not JSON, or an option has another type or value; also raised by the methods.
    """

    def __init__(self, folder: Path):
        self._folder, self._file = folder, folder / CONFIG_FILE
        self._config = _read(self._file)
        self.has_class = "tokenizer_class" in self._config

    def pad_token(self) -> str | None:
        """Return the padding token that the folder names, or None."""
        for file in (self._file, self._folder / SPECIAL_TOKENS_FILE):
            token = _read(file).get("pad_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                if not isinstance(token, str):
                    raise ValueError(f"expected the pad_token in {file} to be a string, got {type(token).__name__}")
                return token
        return None

    def padding_side(self, default: str | None = None) -> str:
        """Return the side of the padding, "left" or "right", as transformers chooses it.

        Args:
          default: side that `tokenizer.json` names, if it does.
        """
        side = self._config.get("padding_side") or default or ("left" if self._is_class(_LEFT) else "right")
        if side not in ("left", "right"):
            raise ValueError(f"expected padding_side in {self._file} to be left or right, got {side!r}")
        if (truncation := self._config.get("truncation_side", "right")) != "right":
            raise ValueError(
                f"expected truncation_side in {self._file} to be right, got {truncation!r}; remove it to keep the "
                "start of long texts"
            )
        return side

    def lowers_case(self) -> bool:
        """Return whether the class of a tokenizer other than BERT's lowercases."""
        return bool(self._flags()["do_lower_case"]) and (not self.has_class or self._is_class(_LOWERS))

    def bert_options(self) -> dict[str, bool | None]:
        """Return the options of BERT's normalizer that transformers changes: the folder's, else their defaults.

        It is empty where the class takes `tokenizer.json` as it is. A folder without class or type of model has only
        the options that it names.
        """
        named = {name: value for name, value in self._flags().items() if value is not None}
        if self.has_class:
            return _BERT_OPTIONS | named if self._is_class(_BERT) else {}
        return _BERT_OPTIONS | named if _read(self._folder / MODEL_FILE).get("model_type") in _BERT_TYPES else named

    def options(self) -> dict[str, Any]:
        """Return the options of `load_tokenizer` that the files name, see `open_clip_options`."""
        model = _read(self._folder / _OPEN_CLIP_FILE)
        model = model.get("model_cfg", model)
        text = model.get("text_cfg") if isinstance(model, dict) else None
        if isinstance(text, dict):
            return open_clip_options(text)
        if not self._is_class(_SIGLIP):
            return {}
        if self._flags()["do_lower_case"] is False:
            raise ValueError(f"expected do_lower_case of SigLIP in {self._file} to be true, got False; set clean")
        return {"clean": "siglip"}

    def _is_class(self, names: str) -> bool:
        """Return whether the class of the tokenizer is one of a pattern of names."""
        return bool(re.fullmatch(rf"{names}Tokenizer(Fast)?", str(self._config.get("tokenizer_class"))))

    def _flags(self) -> dict[str, bool | None]:
        """Return the options of BERT's class; None for those that are not named."""
        for name in _BERT_OPTIONS:
            if (value := self._config.get(name)) not in (None, True, False):
                raise ValueError(f"expected {name} in {self._file} to be true or false, got {value!r}")
        return {name: self._config.get(name) for name in _BERT_OPTIONS}


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write options to where `TokenizerFolder` reads them."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=False) + "\n", encoding="utf-8")


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


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty without one."""
    return read_json(path, limit=CONFIG_BYTES) if path.is_file() else {}
