"""Folders of OpenCLIP with the golden models of `tests/golden/make_open_clip_models.py`."""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

from infcl_jax.data import ByteTokenizer
from infcl_jax.models.convert.tensor_files import read_tensors, write_tensors

GOLDEN = Path(__file__).parent / "golden"
BYTES_VOCABULARY = ByteTokenizer.vocab_size


def open_clip_folder(case: str, folder: Path) -> Path:
    """Write a golden model as a folder of OpenCLIP with a byte vocabulary.

    Token embeddings are repeated up to the number of byte ids. `reference.safetensors` has the inputs and the features
    of OpenCLIP.

    Args:
      case: name in `tests/golden/make_open_clip_models.py`, such as "vit".
      folder: folder to write to, created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = GOLDEN / f"open_clip_{case}.safetensors"
    with safe_open(str(file), "numpy") as tensors:
        config = json.loads(tensors.metadata()["config"])
    config["text_cfg"]["vocab_size"] = BYTES_VOCABULARY
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    golden = {name: np.array(array) for name, array in read_tensors(file).items()}
    weights = {name.removeprefix("weights/"): array for name, array in golden.items() if name.startswith("weights/")}
    rows = weights["token_embedding.weight"]
    weights["token_embedding.weight"] = np.resize(rows, (BYTES_VOCABULARY, rows.shape[1]))
    write_tensors(folder / "open_clip_model.safetensors", weights)
    reference = {name: array for name, array in golden.items() if name.startswith(("inputs/", "features/"))}
    write_tensors(folder / "reference.safetensors", reference)
    return folder
