"""Caption annotations of other tools, which are named in errors."""

from __future__ import annotations

from typing import Any


def check_no_annotations(content: Any, path: str) -> None:
    """Check that JSON holds no annotations of COCO, Karpathy or BLIP.

    Raises:
      ValueError: it does; the message says what to write instead.
    """
    kind = _kind(content)
    if kind is not None:
        raise ValueError(
            f"expected a dataset, got {path}, which has {kind}; write a metadata.jsonl into the folder of the images,"
            ' with a line {"file_name": "0.jpg", "text": ["CAPTION", ...]} for each image'
        )


def _kind(content: Any) -> str | None:
    if isinstance(content, dict):
        first = _first(content.get("images"))
        if first is not None and "sentences" in first:
            return "Karpathy's captions, which only evaluations read (FILE.json?folder=IMAGES)"
        annotation = _first(content.get("annotations"))
        if annotation is not None and "image_id" in annotation:
            return "COCO's captions" if "caption" in annotation else "COCO's annotations without captions"
        return None
    entry = _first(content)
    return "captions as BLIP writes them" if entry is not None and {"image", "caption"} <= entry.keys() else None


def _first(items: Any) -> dict[str, Any] | None:
    """Return the first item of a list of objects."""
    return items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else None
