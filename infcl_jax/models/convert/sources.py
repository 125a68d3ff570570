"""Folders of pretrained models, local and on the Hugging Face Hub."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from infcl_jax.models.convert import hugging_face, open_clip
from infcl_jax.models.convert.tensor_files import Tensors, read_tensors

HUB_PREFIX = "hf-hub:"

_FORMATS = ((open_clip.CONFIG_FILE, open_clip.WEIGHT_FILES), (hugging_face.CONFIG_FILE, hugging_face.WEIGHT_FILES))


class Source(NamedTuple):
    """Files of a pretrained model.

    Attributes:
      name: path or Hub name, for messages.
      config: content of `open_clip_config.json` or `config.json`.
      preprocessor: content of `preprocessor_config.json`; empty without one.
      format: names of the tensors, "open_clip" or "hf".
      folder: local folder of the files.
      weights: file of the tensors.
    """

    name: str
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    format: str
    folder: Path
    weights: Path

    def tensors(self) -> Tensors:
        """Read the tensors.

        Raises:
          ValueError: the file is damaged.
        """
        return read_tensors(self.weights)


def open_source(path: str | Path) -> Source:
    """Find the configuration and the weights of a pretrained model.

    Args:
      path: a folder, or `hf-hub:OWNER/NAME[@REVISION]`, whose files are downloaded to the cache of `huggingface_hub`.

    Raises:
      FileNotFoundError: no such folder or Hub repository, or a file is missing.
      ValueError: a configuration is not JSON.
      ImportError: `huggingface_hub` is not installed (extra "hub").
    """
    hub = str(path).startswith(HUB_PREFIX)
    if not hub and not Path(path).is_dir():
        raise FileNotFoundError(f"expected a folder of a pretrained model or {HUB_PREFIX}OWNER/NAME, got {str(path)!r}")
    find = _hub_finder(str(path)) if hub else _local_finder(Path(path))
    for config_file, weight_files in _FORMATS:
        if (config := find(config_file)) is None:
            continue
        if (weights := next((file for name in weight_files if (file := find(name))), None)) is None:
            raise FileNotFoundError(f"expected one of {', '.join(weight_files)} in {path}, got none")
        if weights.name.endswith(".index.json"):
            for shard in set(read_json(weights)["weight_map"].values()):
                if find(shard) is None:
                    raise FileNotFoundError(f"expected {shard} in {path}, which {weights.name} names, got none")
        preprocessor = find(hugging_face.PREPROCESSOR_FILE)
        return Source(
            str(path),
            read_json(config),
            read_json(preprocessor) if preprocessor else {},
            "open_clip" if config_file == open_clip.CONFIG_FILE else "hf",
            config.parent,
            weights,
        )
    names = " or ".join(name for name, _ in _FORMATS)
    raise FileNotFoundError(f"expected {names} in {path}, got neither; give the folder of an OpenCLIP or CLIP model")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
      ValueError: the file is something else.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object in {path}, got {type(content).__name__}")
    return content


def _local_finder(folder: Path) -> Any:
    return lambda name: folder / name if (folder / name).is_file() else None


def _hub_finder(path: str) -> Any:
    """Return a function that downloads a file of a Hub repository, or returns None if it has no such file."""
    match = re.fullmatch(rf"{HUB_PREFIX}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", path)
    if not match:
        raise ValueError(f"expected {HUB_PREFIX}OWNER/NAME or {HUB_PREFIX}OWNER/NAME@REVISION, got {path!r}")
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise ImportError(f"{path} needs the package huggingface_hub; pip install 'infcl_jax[hub]'") from error
    repository, revision = match.groups()

    def find(name: str) -> Path | None:
        try:
            return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision))
        except EntryNotFoundError:
            return None
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise FileNotFoundError(f"expected the Hub repository {path}, got none: {reason}") from error

    return find
