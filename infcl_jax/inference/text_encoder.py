"""Encoder of queries and passages: a trained model with its tokenizer."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from infcl_jax.data import PairTexts, Passage
from infcl_jax.data.tokenizers.folder_settings import CONFIG_FILE
from infcl_jax.inference.features import TowerEncoder, check_sequence, encode_texts
from infcl_jax.models import TextPairConfig, build_model
from infcl_jax.models.convert.text_pair import ENCODER_FOLDERS, save_text_pair
from infcl_jax.runtime.file_io import CONFIG_BYTES, read_json


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TextEncoder:
    """Encoders of queries and passages with their parameters and tokenizer.

    Features are compared by their dot product. With several processes, each must call the same methods with the same
    arguments, and each gets the results.

    Examples:
      >>> encoder = infcl_jax.load("runs/dpr")
      >>> query = encoder.encode_queries(["who wrote book 0?"])
      >>> passage = encoder.encode_passages(["by author 0", ("Book 1", "by author 1")])
      >>> (query @ passage.T).shape
      (1, 2)

    Attributes:
      config: configuration of the model.
      variables: Flax variables of the model, on `mesh`.
      texts: tokenization of queries and passages.
      mesh: devices, a mesh with an axis "data".
      batch_size: largest number of texts encoded at once, over all devices.
    """

    config: TextPairConfig
    variables: Any
    texts: PairTexts
    mesh: Mesh
    batch_size: int = 256

    def __repr__(self) -> str:
        """Describe the model in a line, without its arrays."""
        count, text = sum(leaf.size for leaf in jax.tree.leaves(self.variables["params"])), self.texts.tokenizer
        return (
            f"TextEncoder({count:,} parameters, passages of at most {text.context_length} tokens of "
            f"{text.vocab_size:,} ids, features of {self.config.embed_dim} dimensions, {self.mesh.size} device(s))"
        )

    @functools.cached_property
    def model(self) -> nn.Module:
        """The `TextPair` module."""
        return build_model(self.config)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Encode queries.

        Args:
          queries: n texts.

        Returns:
          float32 [n, D].

        Raises:
          ValueError: `queries` is not a list of texts.
        """
        return self._encode("query", self.texts.queries, _checked("queries", queries, lambda x: isinstance(x, str)))

    def encode_passages(self, passages: Sequence[str | tuple[str, str] | Passage]) -> np.ndarray:
        """Encode passages, with their titles in front.

        Args:
          passages: n texts, pairs of a title and a text, or `infcl_jax.data.Passage`.

        Returns:
          float32 [n, D].

        Raises:
          ValueError: `passages` is something else.
        """
        values = _checked("passages", passages, _is_passage)
        return self._encode("passage", self.texts.passages, [_passage(value) for value in values])

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write both encoders with their tokenizers, for transformers and Sentence Transformers.

        Args:
          path: folder, created if missing, with the subfolders `query_encoder` and `passage_encoder`.

        Returns:
          One line on the files, read back.

        Raises:
          ValueError: transformers' BERT has no such model, such as one with a projection.

        Examples:
          >>> infcl_jax.load("runs/dpr").save("exported_dpr")
          'exported_dpr (hf): ... tensors match ... parameters; converted back they are equal'
        """
        tokenizers = {"query": self.texts.query_tokenizer, "passage": self.texts.tokenizer}
        lengths = {name: tokenizer.context_length for name, tokenizer in tokenizers.items()}
        checked = save_text_pair(Path(path), self.config, self.variables, lengths)
        for name, tokenizer in tokenizers.items():
            tokenizer.save(folder := Path(path) / ENCODER_FOLDERS[name])
            if (file := folder / CONFIG_FILE).is_file():
                # The class reads tokenizer.json as it is; BERT's class would choose its own lower case.
                options = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": lengths[name]}
                file.write_text(json.dumps(read_json(file, limit=CONFIG_BYTES) | options, indent=2) + "\n")
        return checked

    def _encode(self, tower: str, tokenize: Callable[[Sequence[Any]], np.ndarray], texts: Sequence[Any]) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.config.embed_dim), np.float32)
        encode = TowerEncoder(self.model, f"encode_{tower}")
        return encode_texts(encode, self.variables, tokenize, texts, self.mesh, self.batch_size)


def _checked(name: str, values: Any, is_valid: Callable[[Any], bool]) -> list[Any]:
    """Check that inputs are a list of texts and not a single one."""
    check_sequence(name, values)
    for i, value in enumerate(values):
        if not is_valid(value):
            pair = " or pairs of a title and a text" if name == "passages" else ""
            raise ValueError(f"expected {name} to be texts{pair}, got {type(value).__name__} at {i}")
    return list(values)


def _is_passage(value: Any) -> bool:
    pair = isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(text, str) for text in value)
    return pair or isinstance(value, str | Passage)


def _passage(value: Any) -> Passage:
    if isinstance(value, Passage):
        return value
    return Passage(value) if isinstance(value, str) else Passage(value[1], title=value[0])
