"""Trained and pretrained models to encode with."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.inference.encoder import Encoder, image_resize
from infcl_jax.inference.pretrained_tokenizer import pretrained_tokenizer, suitable_tokenizer
from infcl_jax.models import build_model
from infcl_jax.models.convert import convert, hugging_face, open_source
from infcl_jax.models.convert.api import default_config
from infcl_jax.models.convert.sources import HUB_PREFIX, hub_repository
from infcl_jax.models.open_clip_config import CONFIG_FILE
from infcl_jax.run.base import Run, make_run
from infcl_jax.run.image_text import ImageTextRun
from infcl_jax.run.model import saved_config
from infcl_jax.runtime.mesh import data_mesh, replicate
from infcl_jax.training import CHECKPOINTS

_logger = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    step: int | None = None,
    tokenizer: str | BaseTokenizer | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    batch_size: int = 256,
    dim: int | None = None,
) -> Encoder | Any:  # Any, because a type checker cannot tell runs from their paths
    """Load a model to encode and classify images and texts, or to encode queries and passages.

    Only the parameters of a checkpoint are read, not the optimizer state. An OpenCLIP or Hugging Face model brings its
    own image size, normalization and resize. Its tokenizer is read from the files in its folder or in the subfolder
    `tokenizer`, with their options, or CLIP's for a vocabulary of 49,408 ids.

    Args:
      path: work directory of a run, or a folder, file, Hub name or MODEL:TAG of `infcl_jax.models.load_pretrained`.
      model: name or OpenCLIP configuration of a file of weights without one, such as "ViT-B-32".
      step: step of the run's checkpoint; None: the latest.
      tokenizer: a tokenizer, or a spec of `infcl_jax.data.load_tokenizer`; None: the model's.
      dtype: dtype of activations and features, such as "bfloat16"; None: the model's.
      mesh: devices, a mesh with an axis "data"; None: all devices of all processes.
      batch_size: images or texts encoded at once, over all devices; rounded up to a multiple of their number.
      dim: size of the prefix to which features are cut, for a model trained with `matryoshka`; None: their whole size.

    Returns:
      An `Encoder`; for a run of text retrieval, a `TextEncoder`.

    Raises:
      FileNotFoundError: the run has no such checkpoint, or there is no such Hub repository.
      ValueError: the path holds no model, or an argument does not fit it.
      ImportError: a package of the tokenizer or of the Hub is missing.

    Examples:
      >>> encoder = infcl_jax.load("runs/digits")  # or a model of OpenCLIP or Hugging Face, such as hf-hub:OWNER/NAME
      >>> encoder.embed_dim
      16
    """
    kind = make_run if dim is None else ImageTextRun
    encoder = load_encoder(path, model, step, tokenizer, dtype, mesh, batch_size, kind)
    return encoder if dim is None else encoder.prefix(dim)


def load_encoder(
    path: str | os.PathLike[str],
    model: str | None = None,
    step: int | None = None,
    tokenizer: str | BaseTokenizer | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    batch_size: int = 256,
    kind: Callable[..., Run] = ImageTextRun,
) -> Any:
    """Load a model with its whole features, only of runs of a kind; for the other arguments and errors see `load`."""
    if batch_size < 1:
        raise ValueError(f"expected batch_size >= 1, got {batch_size}")
    folder, mesh = Path(path), data_mesh() if mesh is None else mesh
    if (folder / CHECKPOINTS).is_dir():
        if model is not None:
            raise ValueError(f"expected model=None for a run, which has its own, got {model!r}")
        return kind(saved_config(folder), origin=folder).load(step, tokenizer, dtype, mesh, batch_size)
    configs = (CONFIG_FILE, hugging_face.CONFIG_FILE)
    files = (folder, *(folder / name for name in configs))
    on_hub = str(path).startswith(HUB_PREFIX) or hub_repository(str(path)) is not None
    if not on_hub and not any(file.is_file() for file in files):
        raise ValueError(
            f"expected the work directory of a run (with {CHECKPOINTS}/), a folder with {' or '.join(configs)}, a file "
            f"of weights, {HUB_PREFIX}OWNER/NAME, or MODEL:TAG of OpenCLIP, got {path}"
        )
    if step is not None:
        raise ValueError(f"expected step=None for a pretrained model, which has no steps, got {step}")
    source, changes = open_source(str(path)), {} if dtype is None else {"dtype": dtype, "feature_dtype": None}
    config, variables, checked = convert(source, changes, default_config(source, model))
    _logger.info("%s", checked)
    text = suitable_tokenizer(pretrained_tokenizer(source, config) if tokenizer is None else tokenizer, config)
    return Encoder(build_model(config), replicate(mesh, variables), text, mesh, batch_size, image_resize(config))
