"""Checks of conversions, in one line, with the features of OpenCLIP and transformers where they are installed."""

import functools
import importlib.util
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infcl_jax.models.clip import CLIP
from infcl_jax.models.config import CLIPConfig
from infcl_jax.models.convert.sources import Source
from infcl_jax.models.registry import config_of

_logger = logging.getLogger(__name__)


def summary(
    source: str,
    format: str,
    tensors: int,
    parameters: int,
    *,
    unused: Collection[str] = (),
    resized: Collection[str] = (),
    equal: bool = True,
) -> str:
    """Say in one line what a conversion has checked.

    Args:
      source: file or folder of the tensors.
      format: library that defines the names of the tensors, such as "open_clip".
      tensors: number of tensors, each matched to a parameter.
      parameters: number of parameters and running statistics, each matched to tensors of its shape.
      unused: tensors without a parameter, such as masks.
      resized: position embeddings that were resized.
      equal: whether the variables but the resized ones, converted back, equal the tensors, cast before, bit for bit.
    """
    text = f"{source} ({format}): {tensors} tensors match {parameters} parameters"
    for label, names in (("unused", sorted(unused)), ("resized", list(resized))):
        if names:
            text += f", {label}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
    return f"{text}; converted back they {'are equal' if equal else 'DIFFER'}"


def difference_from_reference(source: Source, model: CLIP, variables: Any) -> str:
    """Say how much the features of a converted model differ from the format's own library, on fixed inputs.

    Returns:
      The end of a `summary`. Empty without the library and PyTorch, or if the library cannot load the files, which is
      logged.
    """
    library = {"open_clip": "open_clip", "hf": "transformers"}[source.format]
    try:
        if any(importlib.util.find_spec(name) is None for name in ("torch", library)):
            return ""
        version = importlib.import_module(library).__version__
        image, text = fixed_inputs(config_of(model))
        expected = _reference_features(source.format, source.weights.parent, image, text)
    except Exception as error:  # of another library, whose versions differ in what they load
        _logger.warning("no features to compare with: %r", error)
        return ""
    encode = (model.encode_image, image), (model.encode_text, text)
    features = [jax.jit(functools.partial(model.apply, method=method))(variables, x) for method, x in encode]
    difference = max(float(np.abs(np.float32(a) - b).max()) for a, b in zip(features, expected, strict=True))
    return f"; features differ from {library} {version} by at most {difference:.1e}"


def _reference_features(format: str, folder: Path, image: np.ndarray, text: np.ndarray) -> list[np.ndarray]:
    """Compute normalized image and text features with the library of a format, in float32 on the CPU."""
    import torch

    pixels, ids = torch.from_numpy(image.transpose(0, 3, 1, 2).copy()), torch.from_numpy(text.astype(np.int64))
    if format == "open_clip":
        import open_clip

        model = open_clip.create_model(f"local-dir:{folder}", precision="fp32").eval()
        encoders = (model.encode_image, pixels), (model.encode_text, ids)
    else:
        import transformers

        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        encoders = (model.get_image_features, pixels), (model.get_text_features, ids)
    with torch.no_grad():
        features = [encode(argument) for encode, argument in encoders]
    # transformers returns the features as the pooled output since version 5.
    vectors = [getattr(array, "pooler_output", array) for array in features]
    return [torch.nn.functional.normalize(array.float(), dim=-1).numpy() for array in vectors]


def fixed_inputs(config: CLIPConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return two random images, float32 as if normalized, and two random texts that end with their end token."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal((2, config.vision.image_size, config.vision.image_size, 3), np.float32)
    end_token = getattr(config.text, "end_token", None)
    end = config.text.vocab_size - 1 if end_token is None else end_token
    text = rng.integers(1, max(2, config.text.vocab_size - 2), (2, config.text.context_length), dtype=np.int32)
    text[text == end] = 1 if end != 1 else 2
    text[:, -1] = end
    return image, text
