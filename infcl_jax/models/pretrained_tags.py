"""Pretrained tags of OpenCLIP and their repositories on the Hugging Face Hub."""

import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path

from infcl_jax.runtime.file_io import read_json

_FILE = Path(__file__).with_suffix(".json")  # written by tests/golden/make_open_clip_tags.py


@functools.cache
def pretrained_tags() -> Mapping[str, Mapping[str, str]]:
    """Return the Hub repository of each tag of each model of OpenCLIP.

    Examples:
      >>> pretrained_tags()["ViT-B-32"]["laion2b_s34b_b79k"]
      'laion/CLIP-ViT-B-32-laion2B-s34B-b79K'
    """
    return read_json(_FILE)


def hub_repository(spec: str) -> str | None:
    """Return the Hub repository of a model with a tag, such as "ViT-B-32:laion2b_s34b_b79k".

    The result is None for what is no model with a tag, such as a path. A slash separates them too, unless it is the
    path of a file.

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
