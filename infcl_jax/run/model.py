"""Settings of an existing run, and the model, image resize and tokenizer of a configuration."""

import dataclasses
import json
from pathlib import Path

from infcl_jax.data import check_vocabulary, load_tokenizer
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer
from infcl_jax.data.tokenizers.clip_vocabulary import CLIP_VOCAB_SIZE
from infcl_jax.data.transforms import RESIZE_MODES, Resize
from infcl_jax.inference.pretrained_tokenizer import TOKENIZER_FOLDER, check_padding_side, pretrained_tokenizer
from infcl_jax.models import BertConfig, CLIPConfig, TextConfig, TextPairConfig, model_config, text_pair_config
from infcl_jax.models.config import config_to_json
from infcl_jax.models.convert.api import read_config
from infcl_jax.models.convert.sources import open_source
from infcl_jax.models.registry import MODEL_FILE, change_config
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.run.text_retrieval import open_bert, read_text_pair
from infcl_jax.runtime.file_io import replace_text
from infcl_jax.settings import (
    SETTINGS,
    AnyConfig,
    RunConfig,
    check_model_overrides,
    flattened,
    make_config,
    model_changes,
    precision_of_overrides,
    with_changes,
)
from infcl_jax.training import CHECKPOINTS, load_config
from infcl_jax.training.checkpoint_folder import step_of

DEFAULT_MODEL = "tiny-shapes"


def saved_config(workdir: str | Path) -> RunConfig:
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
    values = flattened(load_config(workdir))
    for name in values:
        if name not in SETTINGS:
            raise ValueError(f"expected a run of this version in {workdir}, got one with the setting {name}")
    before = {name: setting.before for name, setting in SETTINGS.items() if setting.resolved_once}
    try:
        overrides = SETTINGS["model_overrides"].check(values.get("model_overrides", ""))
        before |= precision_of_overrides(overrides)  # the precision of runs from before the setting
        config = with_changes(RunConfig(), before | values)
    except ValueError as error:
        raise ValueError(f"expected a run of this version in {workdir}, got another configuration: {error}") from error
    if (config.model is None or Path(config.model).name == MODEL_FILE) and (Path(workdir) / MODEL_FILE).is_file():
        return dataclasses.replace(config, model=str(Path(workdir) / MODEL_FILE))  # also of a run that has moved
    return config


def run_of(path: Path) -> tuple[Path | None, int | None]:
    """Return work directory and step of a run or checkpoint, else None."""
    if (path / CHECKPOINTS).is_dir():
        return path, None
    if path.parent.name == CHECKPOINTS and (step := step_of(path.name)) is not None:
        return path.parents[1], step
    return None, None


def base_model(config: RunConfig) -> CLIPConfig:
    """Return the model configuration of a run without its overrides.

    Without `model`, it is that of the weights of `init.model`.

    Raises:
      FileNotFoundError: the weights are missing.
      ValueError: the model is unknown, or the weights have no configuration.
    """
    if config.model is not None or config.init.model is None:
        return model_config(config.model or DEFAULT_MODEL)
    workdir, _ = run_of(Path(config.init.model))
    if workdir is not None:
        model = read_model_config(saved_config(workdir))
    else:
        model = read_config(open_source(config.init.model))
    return dataclasses.replace(model, dtype="float32", param_dtype="float32", feature_dtype=None)


def save_base_model(config: RunConfig, workdir: Path) -> None:
    """Write the model of `init.model` to the work directory, so that a resumed run does not read the weights again."""
    if config.model is None or Path(config.model).name == MODEL_FILE:
        content = json.dumps(config_to_json(base_model(config)), indent=2)
        replace_text(workdir / MODEL_FILE, content + "\n")


def read_model_config(config: AnyConfig) -> CLIPConfig:
    """Return the model configuration of a run, with its overrides.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> infcl_jax.run.read_model_config(config).embed_dim
      16

    Raises:
      ValueError: the model or an override is unknown, an override has the wrong type, or the model encodes queries and
        passages.
    """
    config = make_config(config)
    if text_pair_config(config.model) is not None:
        raise ValueError(
            f"expected a model of images and texts, got model={config.model!r} of queries and passages; see "
            "docs/dense_retrieval.md"
        )
    overrides = model_changes(config.precision, config.model_overrides)
    base = base_model(config)
    check_model_overrides(base, overrides)
    return change_config(base, **overrides)


def read_any_model(config: RunConfig) -> CLIPConfig | TextPairConfig:
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


def text_tokenizer(config: AnyConfig, workdir: str | Path | None = None) -> BaseTokenizer:
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
      ImportError: a package is missing, such as clip-anytorch with CLIP's vocabulary.
    """
    config = make_config(config)
    tokenizer = _load_text_tokenizer(config, None if workdir is None else Path(workdir))
    text = read_any_model(config).text
    end_token = text.end_token if isinstance(text, TextConfig) and text.pool == "end" else tokenizer.end_id
    check_vocabulary(tokenizer, text.vocab_size, end_token)
    check_padding_side(tokenizer, text)
    if isinstance(text, BertConfig) and text.pad_id != tokenizer.pad_id:
        raise ValueError(
            f"expected text.pad_id={tokenizer.pad_id}, as in the tokenizer {tokenizer.kind!r}, got {text.pad_id}; "
            "set it in model_overrides, or choose another tokenizer"
        )
    return tokenizer


def _load_text_tokenizer(config: RunConfig, workdir: Path | None) -> BaseTokenizer:
    """Load the run's copy of its tokenizer, else the one that is set, that of the weights or that of the vocabulary."""
    model, clean = read_any_model(config), config.text_cleaning
    if workdir is not None and (copy := workdir / TOKENIZER_FOLDER).is_dir():
        return load_tokenizer(str(copy), model.text.context_length, clean=clean)
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer, model.text.context_length, clean=clean)
    pair = text_pair_config(config.model)
    size = (base_model(config) if pair is None else pair).text.vocab_size
    spec = {CLIP_VOCAB_SIZE: "clip", ByteTokenizer.vocab_size: "bytes"}.get(size)
    if isinstance(model, TextPairConfig) and config.init.text is not None and spec is None:
        return pretrained_tokenizer(open_bert(config.init.text, model), model, clean)
    if isinstance(model, CLIPConfig) and config.init.model is not None and (spec is None or config.model is None):
        source, _ = run_of(Path(config.init.model))
        if source is None:
            return pretrained_tokenizer(open_source(config.init.model), model, clean)
        if (copy := source / TOKENIZER_FOLDER).is_dir():
            return load_tokenizer(str(copy), model.text.context_length, clean=clean)
        return text_tokenizer(saved_config(source))
    if spec is None:
        raise ValueError(
            f"expected a tokenizer for the {size} token ids of the model {config.model!r}, got None; set tokenizer"
        )
    return load_tokenizer(spec, model.text.context_length, clean=clean)
