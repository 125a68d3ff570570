"""Text cleaning before tokenization, with the options of OpenCLIP and that of transformers' SigLIP."""

from __future__ import annotations

import html
import string

import ftfy

OPEN_CLIP_CLEANINGS = ("whitespace", "lower", "canonicalize")
CLEANINGS = ("none", *OPEN_CLIP_CLEANINGS, "siglip")

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # of SentencePiece
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def check_cleaning(clean: str) -> None:
    """Raise `ValueError` unless `clean` is one of `CLEANINGS`."""
    if clean not in CLEANINGS:
        raise ValueError(f"expected clean to be one of {CLEANINGS}, got {clean!r}")


def clean_text(text: str, clean: str) -> str:
    """Clean one text.

    Args:
      text: the text.
      clean: "none" only replaces lone surrogates. "whitespace" repairs wrongly decoded text, unescapes HTML entities
        and joins words with single spaces. "lower" also lowercases the text, as CLIP does. "canonicalize" also removes
        ASCII punctuation, as OpenCLIP does for SigLIP. "siglip" lowercases, removes ASCII punctuation and joins words,
        as the class of transformers does: "_" becomes no space, and entities and curly quotes remain.

    Returns:
      The cleaned text.
    """
    if clean == "none":  # broken JSON has lone surrogates, which UTF-8 cannot encode
        return _encodable(text)
    if clean == "siglip":
        text = _encodable(text).replace(_SPACE, " ").lower().translate(_NO_PUNCTUATION)
        words = " ".join(text.split())
        return _SPACE + words if words and text[0].isspace() else words  # a token of its own in transformers
    text = _repair(text)
    if clean == "canonicalize":
        text = text.replace("_", " ").translate(_NO_PUNCTUATION).lower()
    text = " ".join(text.split())
    return text.lower() if clean == "lower" else text


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _repair(text: str) -> str:
    """Repair the encoding and unescape HTML entities, which web pages often escape twice."""
    if text.isascii() and text.isprintable() and "&" not in text:
        return text  # ftfy changes none of these texts, and takes longer than their tokenization
    return html.unescape(html.unescape(ftfy.fix_text(text)))
