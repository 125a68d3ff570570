"""Settings of an existing run, and the model, image resize and tokenizer of a configuration."""

from pathlib import Path

from ml_collections import ConfigDict

from infcl_jax.checks import check_choice
from infcl_jax.data import check_vocabulary, load_tokenizer
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer
from infcl_jax.data.tokenizers.clip_vocabulary import CLIP_VOCAB_SIZE
from infcl_jax.data.transforms import RESIZE_MODES, Resize
from infcl_jax.models import BertConfig, CLIPConfig, TextConfig, TextPairConfig, model_config, text_pair_config
from infcl_jax.run.text_retrieval import read_text_pair
from infcl_jax.settings import SETTINGS, check_model_overrides, default_config, flattened, parse_overrides
from infcl_jax.training import load_config

TOKENIZER_FOLDER = "tokenizer"  # of the run's vocabulary, in the work directory


def saved_config(workdir: str | Path) -> ConfigDict:
    """Return the settings of an existing run: the defaults, updated with `config.json`.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> config.batch_size
      32

    Args:
      workdir: directory of the run.

    Raises:
      FileNotFoundError: no run in `workdir`.
      ValueError: `config.json` is not JSON, or a setting is unknown or has the wrong type.
    """
    config, values = default_config(), flattened(load_config(workdir))
    for name in values:
        if name not in SETTINGS:
            raise ValueError(f"expected a run of this version in {workdir}, got one with the setting {name}")
    try:
        for name, value in values.items():
            SETTINGS[name].check(value)
        config.update_from_flattened_dict(values)  # keeps the types that the command line needs
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected a run of this version in {workdir}, got another configuration: {error}") from error
    return config


def read_model_config(config: ConfigDict) -> CLIPConfig:
    """Return the model configuration of a run, with its overrides.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> infcl_jax.run.read_model_config(config).embed_dim
      16

    Raises:
      ValueError: the model or an override is unknown, an override has the wrong type, or the model encodes queries and
        passages.
    """
    if text_pair_config(config.model) is not None:
        raise ValueError(
            f"expected a model of images and texts, got model={config.model!r} of queries and passages; see "
            "docs/dense_retrieval.md"
        )
    overrides = parse_overrides(config.model_overrides)
    check_model_overrides(model_config(config.model), overrides)
    return model_config(config.model, **overrides)


def read_any_model(config: ConfigDict) -> CLIPConfig | TextPairConfig:
    """Return the model configuration of a run, also of text retrieval.

    Raises:
      ValueError: an override is unknown or has the wrong type, see `read_model_config`.
    """
    return read_text_pair(config) or read_model_config(config)


def image_resize(model: CLIPConfig) -> Resize:
    """Return the resize of a model's images in evaluations.

    Raises:
      ValueError: the resize is not supported.
    """
    check_choice("resize_mode", model.resize_mode, RESIZE_MODES)
    return Resize(model.resize_mode, model.interpolation)


def text_tokenizer(config: ConfigDict, workdir: str | Path | None = None) -> BaseTokenizer:
    """Load the tokenizer of a run and check that it fits the model.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> infcl_jax.run.text_tokenizer(config)(["a cat"]).shape
      (1, 36)

    Args:
      config: settings of the run.
      workdir: directory of an existing run, whose copy of the vocabulary is read if it has one.

    Raises:
      ValueError: the tokenizer is unknown, its vocabulary is missing, or it does not fit the model.
      ImportError: a package is missing, such as open_clip_torch with CLIP's vocabulary.
    """
    pair = text_pair_config(config.model)
    text = (read_model_config(config) if pair is None else read_text_pair(config)).text  # type: ignore[union-attr]
    default = model_config(config.model).text if pair is None else pair.text
    spec = config.tokenizer or {CLIP_VOCAB_SIZE: "clip", ByteTokenizer.vocab_size: "bytes"}.get(default.vocab_size)
    if workdir is not None and (copy := Path(workdir) / TOKENIZER_FOLDER).is_dir():
        spec = str(copy)
    if spec is None:
        raise ValueError(
            f"expected a tokenizer for the {default.vocab_size} token ids of the model {config.model!r}, got None; "
            "set tokenizer"
        )
    tokenizer = load_tokenizer(spec, text.context_length, clean=config.text_cleaning)
    end_token = text.end_token if isinstance(text, TextConfig) and text.pool == "end" else tokenizer.end_id
    check_vocabulary(tokenizer, text.vocab_size, end_token)
    if isinstance(text, BertConfig) and text.pad_id != tokenizer.pad_id:
        raise ValueError(
            f"expected text.pad_id={tokenizer.pad_id}, as in the tokenizer {tokenizer.kind!r}, got {text.pad_id}; "
            "set it in model_overrides, or choose another tokenizer"
        )
    return tokenizer
