"""Tokenizer of a run."""

from collections.abc import Callable
from pathlib import Path

from infcl_jax.data import check_vocabulary, load_tokenizer
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer
from infcl_jax.data.tokenizers.clip import CLIP_VOCAB_SIZE
from infcl_jax.inference.pretrained_tokenizer import TOKENIZER_FOLDER, check_padding_side
from infcl_jax.models import BertConfig, CLIPConfig, TextConfig, TextPairConfig
from infcl_jax.settings import RunConfig

_SPECS = {CLIP_VOCAB_SIZE: "clip", ByteTokenizer.vocab_size: "bytes"}  # by the size of a vocabulary


def load_run_tokenizer(
    config: RunConfig,
    model: CLIPConfig | TextPairConfig,
    vocab_size: int,
    of_weights: Callable[[], BaseTokenizer] | None,
    workdir: str | Path | None = None,
) -> BaseTokenizer:
    """Load the tokenizer of a run and check that it fits the model.

    It is the run's copy, else the setting `tokenizer`, that of the initial weights or that of the vocabulary.

    Args:
      config: settings of the run.
      model: configuration of the model.
      vocab_size: token ids of the model without overrides.
      of_weights: function that loads the tokenizer of the initial weights; None: there are none.
      workdir: directory of an existing run, whose copy of the vocabulary is read if it has one.

    Raises:
      ValueError: the tokenizer is unknown, its vocabulary is missing, or it does not fit the model.
      ImportError: a package is missing, such as clip-anytorch with CLIP's vocabulary.
    """
    spec, copied = config.tokenizer, None if workdir is None else Path(workdir) / TOKENIZER_FOLDER
    if copied is not None and copied.is_dir():
        spec = str(copied)
    elif spec is None:
        spec = _SPECS.get(vocab_size)
        if of_weights is not None and (spec is None or config.model is None):
            return _checked(of_weights(), model)
    if spec is None:
        raise ValueError(
            f"expected a tokenizer for the {vocab_size} token ids of the model {config.model!r}, got None; set "
            "tokenizer"
        )
    return _checked(load_tokenizer(spec, model.text.context_length, clean=config.text_cleaning), model)


def _checked(tokenizer: BaseTokenizer, model: CLIPConfig | TextPairConfig) -> BaseTokenizer:
    """Check that a model embeds and pools the ids of its tokenizer."""
    text = model.text
    end_token = text.end_token if isinstance(text, TextConfig) and text.pool == "end" else tokenizer.end_id
    check_vocabulary(tokenizer, text.vocab_size, end_token)
    check_padding_side(tokenizer, text)
    if isinstance(text, BertConfig) and text.pad_id != tokenizer.pad_id:
        raise ValueError(
            f"expected text.pad_id={tokenizer.pad_id}, as in the tokenizer {tokenizer.kind!r}, got {text.pad_id}; "
            "set it in model_overrides, or choose another tokenizer"
        )
    return tokenizer
