"""Tokenizers in the JSON format of Hugging Face `tokenizers`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infcl_jax.data.tokenizers.base import BaseTokenizer, optional_package, read_vocabulary_file
from infcl_jax.data.tokenizers.folder_settings import TokenizerFolder, write_config
from infcl_jax.runtime.printable import printable

_FILE = "tokenizer.json"
_LARGEST = 2**24  # ids; token ids are int32
_SHOWN = 200  # characters of a reason in an error
_PAD_TOKENS = ("[PAD]", "<pad>")
_BERT_ATTRIBUTES = {  # of BERT's normalizer in tokenizers, by option of transformers
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


class HuggingFaceTokenizer(BaseTokenizer):
    """Tokenizer in the JSON format of Hugging Face, such as BERT's WordPiece.

    The file's post-processor adds the special tokens. The padding token is the one that `tokenizer_config.json` or
    `special_tokens_map.json` in the same folder names, or `tokenizer.json`'s, or "[PAD]" or "<pad>".
    The side of the padding is told by `tokenizer_config.json`, of `tokenizer.json` or of the tokenizer's class, as in
    transformers; truncation is on the right. `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` in
    `tokenizer_config.json` are obeyed for the classes that obey them in transformers. `clean` and `strip_sep_token` are
    `tokenizer_kwargs` of `open_clip_config.json` by default, or `clean` of SigLIP's class.
    """

    kind = "hf"

    def __init__(
        self,
        path: str | os.PathLike,
        context_length: int = 77,
        clean: str | None = None,
        strip_sep_token: bool | None = None,
    ):
        """Read a `tokenizer.json`, or the one of a folder; for arguments and errors see `load_tokenizer`."""
        tokenizers = optional_package("tokenizers")
        file = Path(path) / _FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ValueError(
                f"expected a tokenizer of Hugging Face at {path}, got no file {file};"
                " AutoTokenizer.from_pretrained(NAME).save_pretrained(PATH) writes one"
            )
        data = read_vocabulary_file(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            padding = self._tokenizer.padding or {}
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            encoded = self._tokenizer.encode("a")
        except BaseException as error:  # the package raises no narrower class, and PanicException is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = printable(str(error))[:_SHOWN]
            raise ValueError(f"expected the JSON of a tokenizer in {file}, got {reason}") from None
        folder = TokenizerFolder(file.parent)
        self._pad_token = self._find_pad_token(file, folder.pad_token() or padding.get("pad_token"))
        self._normalize_as_class(folder)
        options = folder.options()
        clean = options.get("clean", "none") if clean is None else clean
        self.strip_sep_token = bool(options.get("strip_sep_token") if strip_sep_token is None else strip_sep_token)
        size = max(self._tokenizer.get_vocab().values()) + 1
        if size > _LARGEST or not 0 <= max(encoded.ids, default=-1) < size:
            raise ValueError(f"expected ids of tokens below {min(size, _LARGEST)} in {file}, got larger ones or none")
        special = encoded.special_tokens_mask
        text = [index for index, mask in enumerate(special) if not mask] or [len(special) - 1]
        suffix = len(special) - 1 - text[-1]
        super().__init__(
            context_length,
            clean,
            vocab_size=size,
            pad_id=self._tokenizer.token_to_id(self._pad_token),
            end_id=encoded.ids[-1] if suffix else None,
            prefix=text[0],
            suffix=suffix,
            padding_side=folder.padding_side(padding.get("direction")),
        )

    def _normalize_as_class(self, folder: TokenizerFolder) -> None:
        """Change the normalizer as the tokenizer's class does in transformers."""
        from tokenizers import normalizers

        normalizer, options = self._tokenizer.normalizer, folder.bert_options()
        if isinstance(normalizer, normalizers.BertNormalizer):
            for name, value in options.items():
                setattr(normalizer, _BERT_ATTRIBUTES[name], value)
        elif folder.lowers_case():
            steps = [normalizers.Lowercase(), *([] if normalizer is None else [normalizer])]
            self._tokenizer.normalizer = normalizers.Sequence(steps)

    def _find_pad_token(self, file: Path, named: str | None) -> str:
        """Check that the padding token is in the vocabulary, or find one."""
        for token in (named,) if named else _PAD_TOKENS:
            if self._tokenizer.token_to_id(token) is not None:
                return token
        raise ValueError(
            f"expected a padding token in the vocabulary of {file}, got {printable(named or 'none named')[:_SHOWN]};"
            " name one as pad_token in tokenizer_config.json in its folder"
        )

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        # One by one: `encode_batch` starts threads, which compete with the other worker processes.
        rows = [self._tokenizer.encode(text).ids for text in texts]
        if self.strip_sep_token:
            rows = [[0 if token == self.end_id else token for token in row] for row in rows]
        return rows

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _save_vocabulary(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / _FILE))
        # This class of transformers reads tokenizer.json as it is; BERT's class would choose its own lower case.
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": self._pad_token}
        config["padding_side"] = self.padding_side
        if self.end_id is not None:
            config["sep_token"] = self._tokenizer.id_to_token(self.end_id)
        write_config(folder, config)

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | ({"strip_sep_token": True} if self.strip_sep_token else {})
