"""Certificates of conversions."""

import dataclasses
import functools
import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infcl_jax.models.clip import CLIP
from infcl_jax.models.config import CLIPConfig
from infcl_jax.models.convert.configs import config_of
from infcl_jax.models.convert.reference import installed_reference, reference_features
from infcl_jax.models.convert.sources import Source

CERTIFICATE_FILE = "certificate.json"

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """Evidence that a conversion lost nothing.

    Every parameter has its tensors and every other tensor is in `unused`, else the conversion raises `ValueError`.

    Examples:
      >>> certificate = save_pretrained("certified", model, variables)
      >>> certificate.parameters, certificate.reexport_equal
      (38, True)

    Attributes:
      source: file or folder of the tensors.
      format: library that defines the names of the tensors, such as "open_clip".
      parameters: number of parameters and running statistics of the model, each matched to tensors of its shape.
      tensors: number of tensors, each matched to a parameter.
      unused: tensors without a parameter, such as masks.
      resized: position embeddings that were resized.
      dtype: dtype to which the tensors were cast; None for their own dtypes.
      reexport_equal: whether the variables, converted back, equal the tensors bit for bit. Resized embeddings are left
        out, and tensors are cast before.
      reference: library that computed the reference features, with its version; None if it is not installed.
      feature_difference: largest absolute difference of the normalized image and text features from the reference, on
        fixed inputs; None without a reference.
    """

    source: str
    format: str
    parameters: int
    tensors: int
    unused: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    dtype: str | None = None
    reexport_equal: bool = True
    reference: str | None = None
    feature_difference: float | None = None

    def summary(self) -> str:
        """Format as one line for the log."""
        text = f"{self.source} ({self.format}): {self.tensors} tensors match {self.parameters} parameters"
        for name in ("unused", "resized"):
            if names := getattr(self, name):
                text += f", {name}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        text += f"; converted back they {'are equal' if self.reexport_equal else 'DIFFER'}"
        if self.reference is not None:
            text += f"; features differ from {self.reference} by at most {self.feature_difference:.1e}"
        return text

    def save(self, path: Path) -> None:
        """Write the fields as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def feature_difference(certificate: Certificate, source: Source, model: CLIP, variables: Any) -> Certificate:
    """Add the largest feature difference from the format's own library.

    Args:
      certificate: certificate of the conversion.
      source: files of the model.
      model: the converted model.
      variables: its variables.

    Returns:
      The certificate with `reference` and `feature_difference`; unchanged without the library, or if the library cannot
      load the files, which is logged.
    """
    try:
        reference = installed_reference(certificate.format)
        if reference is None:
            return certificate
        image, text = fixed_inputs(config_of(model))
        expected = reference_features(certificate.format, source.weights.parent, image, text)
    except Exception as error:  # of another library, whose versions differ in what they load
        _logger.warning("no features to compare with: %r", error)
        return certificate
    encode = (model.encode_image, image), (model.encode_text, text)
    features = [jax.jit(functools.partial(model.apply, method=method))(variables, x) for method, x in encode]
    difference = max(float(np.abs(np.float32(a) - b).max()) for a, b in zip(features, expected, strict=True))
    return dataclasses.replace(certificate, reference=reference, feature_difference=difference)


def fixed_inputs(config: CLIPConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return two random images and texts.

    Each text ends with its end token.

    Returns:
      float32 [2, h, w, 3], as if normalized; int32 [2, t].
    """
    rng = np.random.default_rng(0)
    image = rng.standard_normal((2, config.vision.image_size, config.vision.image_size, 3), np.float32)
    end_token = getattr(config.text, "end_token", None)
    end = config.text.vocab_size - 1 if end_token is None else end_token
    text = rng.integers(1, max(2, config.text.vocab_size - 2), (2, config.text.context_length), dtype=np.int32)
    text[text == end] = 1 if end != 1 else 2
    text[:, -1] = end
    return image, text
