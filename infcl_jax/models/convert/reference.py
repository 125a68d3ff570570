"""Features of OpenCLIP and transformers, where they are installed."""

import importlib.util
from pathlib import Path

import numpy as np


def installed_reference(format: str) -> str | None:
    """Return the library of a format with its version if it and PyTorch are installed, else None."""
    library = {"open_clip": "open_clip", "hf": "transformers"}[format]
    if any(importlib.util.find_spec(name) is None for name in ("torch", library)):
        return None
    return f"{library} {importlib.import_module(library).__version__}"


def reference_features(format: str, folder: Path, image: np.ndarray, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the normalized features of a folder with its own library, in float32 on the CPU.

    Args:
      format: "open_clip" or "hf".
      folder: folder of the model.
      image: float32 [b, h, w, 3], normalized by mean and standard deviation.
      text: int32 [b, t].

    Returns:
      Image and text features, float32 [b, embed_dim].
    """
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
    image_features, text_features = (torch.nn.functional.normalize(array.float(), dim=-1).numpy() for array in vectors)
    return image_features, text_features
