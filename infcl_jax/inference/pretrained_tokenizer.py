"""Tokenizer of a pretrained model."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from infcl_jax.data import ByteTokenizer, load_tokenizer
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.tokenizers.base import OPEN_CLIP_CLEANINGS, SETTINGS_FILE
from infcl_jax.data.tokenizers.clip import CLIP_VOCAB_SIZE
from infcl_jax.data.tokenizers.folder_settings import (
    CONFIG_FILE,
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    TokenizerFolder,
    open_clip_options,
)
from infcl_jax.models import CLIPConfig, TextPairConfig
from infcl_jax.models.config import BertConfig, TextConfig
from infcl_jax.models.convert.open_clip_files import UNNAMED_TOKENIZER
from infcl_jax.models.convert.sources import HUB_PREFIX, Finder, Source, hub_finder
from infcl_jax.models.open_clip_config import CONFIG_FILE as OPEN_CLIP_FILE
from infcl_jax.runtime.file_io import CONFIG_BYTES, read_json

_logger = logging.getLogger(__name__)

TOKENIZER_FOLDER = "tokenizer"  # of the vocabulary of a run, in its work directory, or of an exported model

# Files of each kind of tokenizer; the first one tells the kind.
_FILES = {
    "clip": ("merges.txt", "vocab.json"),
    "hf": ("tokenizer.json", CONFIG_FILE),
    "sentencepiece": ("spiece.model", CONFIG_FILE),
    "bytes": (),
}
_KINDS = {files[0]: kind for kind, files in _FILES.items() if files}
_SLOW = (  # what remains of the files of models before tokenizer.json
    "vocab.txt alone is not supported: write tokenizer.json with AutoTokenizer.from_pretrained(NAME)"
    ".save_pretrained(FOLDER), and pass tokenizer='hf:FOLDER'"
)
_SAVED = f"{TOKENIZER_FOLDER}/{SETTINGS_FILE}"  # of `Encoder.save` and exports


def pretrained_tokenizer(source: Source, model: CLIPConfig | TextPairConfig, clean: str | None = None) -> BaseTokenizer:
    """Load the tokenizer of a pretrained model.

    Its files are in the folder or Hub repository of the model, in the subfolder `tokenizer`, or in the Hub repository
    that OpenCLIP's configuration names. CLIP's vocabulary may also be in an installed package.

    Raises:
      FileNotFoundError: a file on the Hub cannot be fetched.
      ValueError: there is no tokenizer for the vocabulary of the model, or it has an option that is not supported.
      ImportError: a package of the tokenizer is missing.
    """
    length, is_clip = model.text.context_length, model.text.vocab_size == CLIP_VOCAB_SIZE
    text = ((source.config or {}).get("model_cfg") or source.config or {}).get("text_cfg") or {}
    found = _find(source, text.get("hf_tokenizer_name") or "", is_clip)
    if found is None:
        kind = "clip" if is_clip else "bytes"
        if not is_clip and model.text.vocab_size != ByteTokenizer.vocab_size:
            raise ValueError(
                f"expected the files of a tokenizer ({', '.join(_KINDS)}) in {source.name} for a vocabulary of "
                f"{model.text.vocab_size} ids, got none; pass tokenizer=; {_SLOW}"
            )
        spec = kind
    elif found.name == SETTINGS_FILE:
        return load_tokenizer(found.parent, length, clean=clean)
    else:
        kind = _KINDS[found.name]
        spec = f"{kind}:{found.parent if kind != 'sentencepiece' else found}"
    options = open_clip_options(text, "lower" if kind == "clip" else "whitespace")
    options = {"context_length": length} | options | ({} if clean is None else {"clean": clean})
    tokenizer = load_tokenizer(spec, **options)
    tokenizer.repository = text.get("hf_tokenizer_name")
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: BaseTokenizer) -> None:
    """Write the tokenizer of an exported model to its subfolder `tokenizer`, and for OpenCLIP to the folder.

    OpenCLIP's configuration in the folder names the tokenizer of Hugging Face and its options. OpenCLIP has no
    `clean="none"`; it cleans as "whitespace", which a warning says.
    """
    tokenizer.save(saved := folder / TOKENIZER_FOLDER)
    if tokenizer.kind not in ("hf", "sentencepiece") or not (file := folder / OPEN_CLIP_FILE).is_file():
        return
    content = read_json(file, limit=CONFIG_BYTES)
    text = content["model_cfg"]["text_cfg"]
    text["hf_tokenizer_name"] = tokenizer.repository or text.get("hf_tokenizer_name") or UNNAMED_TOKENIZER
    options: dict[str, Any] = {"clean": tokenizer.clean} if tokenizer.clean in OPEN_CLIP_CLEANINGS else {}
    if getattr(tokenizer, "strip_sep_token", False):
        options["strip_sep_token"] = True
    text["tokenizer_kwargs"] = options
    file.write_text(json.dumps(content, indent=2) + "\n")
    if tokenizer.clean == "none":
        _logger.warning(
            "expected a text cleaning of OpenCLIP in %s, got none: OpenCLIP repairs texts and unescapes HTML entities "
            'before the tokenizer; load the tokenizer with clean="whitespace" for equal ids',
            file,
        )
    if tokenizer.kind == "hf" and tokenizer.clean != "siglip":  # OpenCLIP lacks this cleaning, and fails without files
        for name in _FILES["hf"]:
            shutil.copyfile(saved / name, folder / name)


def copy_tokenizer(workdir: Path, folder: Path) -> None:
    """Copy the tokenizer of a run, if it has one, to the folder of an exported model."""
    if (copied := workdir / TOKENIZER_FOLDER).is_dir():
        save_tokenizer(folder, load_tokenizer(copied))


def suitable_tokenizer(tokenizer: str | BaseTokenizer, model: CLIPConfig) -> BaseTokenizer:
    """Load a tokenizer for a model from a spec of `load_tokenizer`, and check that the model embeds its ids.

    Raises:
      ValueError: the tokenizer has more ids or longer rows than the model, or pads on another side.
    """
    if not isinstance(tokenizer, BaseTokenizer):
        tokenizer = load_tokenizer(tokenizer, model.text.context_length)
    if tokenizer.vocab_size > model.text.vocab_size or tokenizer.context_length > model.text.context_length:
        raise ValueError(
            f"expected a tokenizer of at most {model.text.vocab_size} ids and {model.text.context_length} tokens, got "
            f"{tokenizer.kind!r} of {tokenizer.vocab_size} ids and {tokenizer.context_length} tokens; choose another"
        )
    check_padding_side(tokenizer, model.text)
    return tokenizer


def check_padding_side(tokenizer: BaseTokenizer, text: TextConfig | BertConfig) -> None:
    """Check that a text tower encodes rows padded on the side of a tokenizer.

    Raises:
      ValueError: the tower is a BERT, which expects the first token first, and the padding is on the left.
    """
    if isinstance(text, BertConfig) and tokenizer.padding_side == "left":
        raise ValueError(
            "expected a tokenizer that pads on the right for a BERT text tower, got one that pads on the left; set "
            f'"padding_side": "right" in its {CONFIG_FILE}'
        )


def _find(source: Source, repository: str, is_clip: bool) -> Path | None:
    """Return the file that tells the kind of a tokenizer, with the further files beside it."""
    names = [name for name, kind in _KINDS.items() if is_clip or kind != "clip"]
    names = [_SAVED, *names, *(f"{TOKENIZER_FOLDER}/{name}" for name in names)]
    try:
        if (found := _with_further_files(source.find, names)) is not None:
            return found
    except FileNotFoundError as error:
        if not is_clip and not repository:  # CLIP's vocabulary has one content
            raise FileNotFoundError(f"{error}; {_SLOW}") from error
    if not source.name.startswith(HUB_PREFIX) or not repository:
        return None
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
        raise ValueError(f"expected text_cfg.hf_tokenizer_name to be OWNER/NAME, got {repository!r}; pass tokenizer=")
    return _with_further_files(hub_finder(repository), names)


def _with_further_files(find: Finder, names: list[str]) -> Path | None:
    """Find the first file, and fetch the files that its tokenizer reads too."""
    if (found := find(*names)) is None:
        return None
    prefix = f"{TOKENIZER_FOLDER}/" if found.parent.name == TOKENIZER_FOLDER else ""
    kind = read_json(found, limit=CONFIG_BYTES).get("kind") if found.name == SETTINGS_FILE else _KINDS[found.name]
    files = _FILES.get(kind, ())  # `load_tokenizer` refuses another kind
    for name in files:
        find(prefix + name)
    if CONFIG_FILE in files:
        folder = TokenizerFolder(found.parent)
        if folder.pad_token() is None:
            find(prefix + SPECIAL_TOKENS_FILE)
        if not folder.has_class:
            find(prefix + MODEL_FILE)
    return found
