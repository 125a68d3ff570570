"""Folders of pretrained models, local and on the Hugging Face Hub."""

import difflib
import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infcl_jax.models.convert import bert, hugging_face, open_clip
from infcl_jax.models.convert.tensor_files import Tensors, read_index, read_tensors
from infcl_jax.models.open_clip_config import CONFIG_FILE
from infcl_jax.runtime.file_io import CONFIG_BYTES, read_json
from infcl_jax.runtime.printable import printable

HUB_PREFIX = "hf-hub:"
_TAGS = Path(__file__).parents[1] / "pretrained_tags.json"  # written by tests/golden/make_open_clip_tags.py

# Returns the first file of a repository or folder that exists, from names in the order of preference, else None.
Finder = Callable[..., Path | None]

_FORMATS = {
    CONFIG_FILE: ("open_clip", open_clip.WEIGHT_FILES),
    hugging_face.CONFIG_FILE: ("hf", hugging_face.WEIGHT_FILES),
}


class Source(NamedTuple):
    """Files of a pretrained model.

    Attributes:
      name: path or Hub name, for messages.
      config: content of `open_clip_config.json` or `config.json`; None for a file of weights alone.
      preprocessor: content of `preprocessor_config.json`; empty without one.
      format: names of the tensors, "open_clip" or "hf".
      weights: local file of the tensors, in the folder of the other files.
      find: finds further files by name, such as the tokenizer's, and downloads them from the Hub.
    """

    name: str
    config: dict[str, Any] | None
    preprocessor: dict[str, Any]
    format: str
    weights: Path
    find: Finder

    def tensors(self) -> Tensors:
        """Read the tensors; a damaged file raises `ValueError`."""
        return read_tensors(self.weights)


def open_source(path: str | Path) -> Source:
    """Find the configuration and the weights of a pretrained model.

    Args:
      path: see `infcl_jax.models.load_pretrained`. The folder of a file has its configuration; without one, the names
        are OpenCLIP's.

    Raises:
      FileNotFoundError: no such folder, file or Hub repository, or a file is missing.
      ValueError: a configuration is not JSON.
      ImportError: `huggingface_hub` is not installed (extra "hub").
    """
    if (repository := hub_repository(str(path))) is not None:
        path = f"{HUB_PREFIX}{repository}"
    find = _finder(str(path))
    if (config := find(*_FORMATS)) is None:
        if Path(path).is_file():
            return Source(str(path), None, {}, "open_clip", Path(path), find)
        names = " or ".join(_FORMATS)
        raise FileNotFoundError(
            f"expected {names} in {path}, got neither; give the folder of an OpenCLIP or CLIP model"
        )
    format, weight_files = _FORMATS[config.name]
    candidates = (Path(path).name,) if Path(path).is_file() else weight_files
    if (weights := find(*candidates)) is None:
        raise FileNotFoundError(f"expected one of {', '.join(candidates)} in {path}, got none")
    if weights.name.endswith(".index.json"):
        for shard in dict.fromkeys(read_index(weights).values()):
            if find(shard) is None:
                raise FileNotFoundError(f"expected {shard} in {path}, which {weights.name} names, got none")
    content = read_json(config, limit=CONFIG_BYTES)
    preprocessor = _preprocessor(find) if format == "hf" and content.get("model_type") not in bert.KINDS else {}
    return Source(str(path), content, preprocessor, format, weights, find)


def _preprocessor(find: Finder) -> dict[str, Any]:
    """Return the image preprocessing of transformers; since version 5, a processor's file has it as an object."""
    file = find(hugging_face.PREPROCESSOR_FILE, hugging_face.PROCESSOR_FILE)
    content = {} if file is None else read_json(file, limit=CONFIG_BYTES)
    nested = content.get("image_processor")
    return nested if isinstance(nested, dict) else content


def _finder(path: str) -> Finder:
    if path.startswith(HUB_PREFIX):
        match = re.fullmatch(rf"{HUB_PREFIX}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", path)
        if not match:
            raise ValueError(f"expected {HUB_PREFIX}OWNER/NAME or {HUB_PREFIX}OWNER/NAME@REVISION, got {path!r}")
        return hub_finder(*match.groups())
    if not Path(path).exists():
        raise FileNotFoundError(
            f"expected a pretrained model, got {path!r}, which does not exist; give its folder, a file of weights, "
            f"{HUB_PREFIX}OWNER/NAME or MODEL:TAG of OpenCLIP"
        )
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return lambda *names: next((folder / name for name in names if (folder / name).is_file()), None)


def hub_finder(repository: str, revision: str | None = None) -> Finder:
    """Return a function that downloads the first file of a Hub repository OWNER/NAME that exists.

    A file that cannot be fetched is no file that the repository lacks. It is passed over for another name, and without
    one it is an error.

    Raises:
      ImportError: `huggingface_hub` is not installed (extra "hub").
    """
    path = f"{HUB_PREFIX}{repository}{f'@{revision}' if revision else ''}"
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ImportError(f"{path} needs the package huggingface_hub; pip install 'infcl_jax[hub]'") from error

    def find(*names: str) -> Path | None:
        unreachable = None
        for name in names:
            try:
                return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision))
            except errors.LocalEntryNotFoundError as error:  # a subclass of EntryNotFoundError
                if huggingface_hub.try_to_load_from_cache(repository, name, revision=revision) is None:
                    unreachable = error  # else the cache has recorded that the repository lacks it
            except errors.EntryNotFoundError:
                pass
            except errors.HfHubHTTPError as error:
                raise FileNotFoundError(_refusal(path, error, errors)) from error
        if unreachable is not None:
            raise FileNotFoundError(_unreachable(path, names)) from unreachable
        return None

    return find


def _refusal(path: str, error: Exception, errors: Any) -> str:
    """Describe why the Hub refuses a repository."""
    reason, log_in = printable(str(error).strip().splitlines()[-1]), "log in with `hf auth login` or HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        expected, advice = "access to the gated Hub repository", f"accept its terms on its page, and {log_in}"
    elif isinstance(error, errors.RevisionNotFoundError):
        return f"expected the revision of {path} on the Hub, got none: {reason}; give a branch, tag or commit"
    elif isinstance(error, errors.RepositoryNotFoundError):
        expected, advice = "the Hub repository", f"check its name, and {log_in} if it is private"
    else:
        return f"expected the files of {path} from the Hub, got an error: {reason}; try again later"
    return f"expected {expected} {path}, got none: {reason}; {advice}"


def _unreachable(path: str, names: Collection[str]) -> str:
    """Describe files that are neither cached nor known to be absent."""
    from huggingface_hub import constants

    cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"there is no connection to {constants.ENDPOINT}"
    return (
        f"expected {' or '.join(names)} of {path} in the cache {constants.HF_HUB_CACHE}, got none, and {cause}; load "
        "the model once with a connection, which fills the cache"
    )


@functools.cache
def pretrained_tags() -> Mapping[str, Mapping[str, str]]:
    """Return the Hub repository of each pretrained tag of each model of OpenCLIP."""
    return read_json(_TAGS)


def hub_repository(spec: str) -> str | None:
    """Return the Hub repository of a model with a tag, such as "ViT-B-32:laion2b_s34b_b79k", else None.

    A slash separates them too, unless it is the path of a file.

    Raises:
      ValueError: the model has no such tag; the message lists its tags.
    """
    match = re.fullmatch(r"(.+)[:/]([^:/]*)", spec)
    tags = pretrained_tags().get(match[1].replace("/", "-")) if match else None
    if tags is None or Path(spec).exists():
        return None
    tag = match[2].lower().replace("-", "_")  # as in OpenCLIP
    if tag not in tags:
        close = difflib.get_close_matches(tag, tags, n=1)
        hint = f"; did you mean {match[1]}:{close[0]}?" if close else ""
        raise ValueError(f"expected a tag of {match[1]} ({', '.join(tags)}), got {match[2]!r}{hint}")
    return tags[tag]
