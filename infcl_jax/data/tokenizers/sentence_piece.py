"""Tokenizers of SentencePiece (Kudo and Richardson 2018)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infcl_jax.data.tokenizers.base import BaseTokenizer, optional_package, read_vocabulary_file
from infcl_jax.data.tokenizers.folder_settings import TokenizerFolder, write_config
from infcl_jax.runtime.printable import printable

_SHOWN = 200  # characters of a reason in an error
_FILES = ("spiece.model", "sentencepiece.model", "tokenizer.model")


class SentencePieceTokenizer(BaseTokenizer):
    """Tokenizer of a SentencePiece model, with the conventions of T5 and SigLIP.

    A row is text, the model's end token and padding, without a start token. The padding token is the one that
    `tokenizer_config.json` or `special_tokens_map.json` in the model's folder names, else the model's own, else its end
    token. T5's model has its own (0). SigLIP pads with the end token (1), which its folder names. SigLIP also needs
    `clean="siglip"`, the default where its folder names the class of its tokenizer, or OpenCLIP's "canonicalize". Other
    defaults are `clean` of `tokenizer_kwargs` in `open_clip_config.json`, and "lower" with `do_lower_case` in
    `tokenizer_config.json`. Text never becomes a special token.
    """

    kind = "sentencepiece"

    def __init__(self, path: str | os.PathLike, context_length: int = 77, clean: str | None = None):
        """Read a model file, or the one of a folder; for arguments and errors see `load_tokenizer`."""
        sentencepiece = optional_package("sentencepiece")
        path = Path(path)
        file = next((path / name for name in _FILES if (path / name).is_file()), path)
        if not file.is_file():
            raise ValueError(f"expected a SentencePiece model at {path}, got no file; a folder needs one of {_FILES}")
        data = read_vocabulary_file(file)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
            size, end = self._model.vocab_size(), self._model.eos_id()
        except Exception as error:  # the package raises RuntimeError or TypeError
            reason = printable(str(error))[:_SHOWN]
            raise ValueError(f"expected a SentencePiece model in {file}, got {reason}") from None
        if end < 0:
            raise ValueError(f"expected an end token in {file}, got a model without; train it with eos_id >= 0")
        folder = TokenizerFolder(file.parent)
        token, pad = folder.pad_token(), self._model.pad_id() if self._model.pad_id() >= 0 else end
        if token is not None and self._model.id_to_piece(pad := self._model.piece_to_id(token)) != token:
            raise ValueError(f"expected the padding token {token!r} in the vocabulary of {file}, got no such token")
        if clean is None:
            clean = folder.options().get("clean", "lower" if folder.lowers_case() else "none")
        special: dict[str, Any] = {"prefix": 0, "suffix": 1, "padding_side": folder.padding_side()}
        super().__init__(context_length, clean, vocab_size=size, pad_id=pad, end_id=end, **special)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self._model.encode(text), self.end_id] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        while self.padding_side == "left" and len(ids) > 1 and ids[0] == self.pad_id:
            ids = ids[1:]
        end = ids.index(self.end_id) if self.end_id in ids else len(ids)
        return self._model.decode([token for token in ids[:end] if token != self.pad_id])

    def _save_vocabulary(self, folder: Path) -> None:
        (folder / _FILES[0]).write_bytes(self._model.serialized_model_proto())
        pad_token = self._model.id_to_piece(self.pad_id)
        write_config(folder, {"pad_token": pad_token, "padding_side": self.padding_side})
