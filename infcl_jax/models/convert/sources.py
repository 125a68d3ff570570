"""Folders of pretrained models, local and on the Hugging Face Hub."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from infcl_jax.file_io import CONFIG_BYTES, read_json
from infcl_jax.models.convert import hugging_face, open_clip
from infcl_jax.models.convert.tensor_files import Tensors, read_index, read_tensors
from infcl_jax.models.open_clip_config import CONFIG_FILE

HUB_PREFIX = "hf-hub:"

_FORMATS = (
    ("open_clip", CONFIG_FILE, open_clip.WEIGHT_FILES),
    ("hf", hugging_face.CONFIG_FILE, hugging_face.WEIGHT_FILES),
)


class Source(NamedTuple):
    """Files of a pretrained model.

    Attributes:
      name: path or Hub name, for messages.
      config: content of `open_clip_config.json` or `config.json`; None for a file of weights alone.
      preprocessor: content of `preprocessor_config.json`; empty without one.
      format: names of the tensors, "open_clip" or "hf".
      weights: local file of the tensors, in the folder of the other files.
    """

    name: str
    config: dict[str, Any] | None
    preprocessor: dict[str, Any]
    format: str
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
      path: a folder, a file of weights, or `hf-hub:OWNER/NAME[@REVISION]`, whose files are downloaded to the cache of
        `huggingface_hub`. The folder of a file has its configuration. Without one, the names are OpenCLIP's.

    Raises:
      FileNotFoundError: no such folder, file or Hub repository, or a file is missing.
      ValueError: a configuration is not JSON.
      ImportError: `huggingface_hub` is not installed (extra "hub").
    """
    find = _hub_finder(str(path)) if str(path).startswith(HUB_PREFIX) else _local_finder(Path(path))
    for format, config_file, weight_files in _FORMATS:
        if (config := find(config_file)) is None:
            continue
        candidates = (Path(path).name,) if Path(path).is_file() else weight_files
        if (weights := next((file for name in candidates if (file := find(name))), None)) is None:
            raise FileNotFoundError(f"expected one of {', '.join(candidates)} in {path}, got none")
        if weights.name.endswith(".index.json"):
            for shard in dict.fromkeys(read_index(weights).values()):
                if find(shard) is None:
                    raise FileNotFoundError(f"expected {shard} in {path}, which {weights.name} names, got none")
        preprocessor = find(hugging_face.PREPROCESSOR_FILE)
        content = read_json(preprocessor, limit=CONFIG_BYTES) if preprocessor else {}
        return Source(str(path), read_json(config, limit=CONFIG_BYTES), content, format, weights)
    if Path(path).is_file():
        return Source(str(path), None, {}, "open_clip", Path(path))
    names = " or ".join(name for _, name, _ in _FORMATS)
    raise FileNotFoundError(f"expected {names} in {path}, got neither; give the folder of an OpenCLIP or CLIP model")


def _local_finder(path: Path) -> Callable[[str], Path | None]:
    """Return a function that finds a file by name in a local folder."""
    if not path.exists():
        raise FileNotFoundError(
            f"expected a pretrained model, got {str(path)!r}, which does not exist; give its folder, a file of weights "
            f"or {HUB_PREFIX}OWNER/NAME"
        )
    folder = path if path.is_dir() else path.parent
    return lambda name: folder / name if (folder / name).is_file() else None


def _hub_finder(path: str) -> Callable[[str], Path | None]:
    """Return a function that downloads a file of a Hub repository by name."""
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
