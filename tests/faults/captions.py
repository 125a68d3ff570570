"""Damaged and hostile captions."""

import json
from pathlib import Path

import numpy as np

from tests.faults import images, tars
from tests.faults.case import Case, choose

TEXTS = (
    "a\0b",
    "\x01\x02\x1b[31m red \x7f",
    "\u202eright to left\u202c \u200f\u200e",
    "مرحبا بالعالم",
    "\ud800",
    "a \udfff lone surrogate",
    "👩‍👩‍👧‍👦" * 50,
    "e" + "\u0301" * 5000,
    "word " * 200_000,
    "x" * 2**20,
    "的" * 300_000,
    "&amp;" * 50_000 + "&lt;script&gt;",
    "<|startoftext|> a <end_of_text> </s> [CLS] <pad>",
    "\ufeff\ufffe\uffff",
    "\u2028line\u2029paragraph\x85",
    " \t\n\u3000 ",
    "",
    "'s't're" * 1000,
    "0" * 10_000,
)
BYTES = (b"caf\xe9", b"\xff\xfea\0", b"\xf0\x9f", b"\xc0\x80", b"\xed\xa0\x80")


def draw(rng: np.random.Generator, folder: Path) -> Case:
    """Write a dataset of two intact captions and four hostile ones."""
    kind, pixels = choose(("folder", "tar", "jsonl"), rng), images.rgb(rng)
    data = images.encoded(images.Image.fromarray(pixels), "PNG")
    texts: list[str | bytes] = [choose(TEXTS if rng.random() < 0.7 else BYTES, rng) for _ in range(4)]
    texts = ["caption 0", *texts, "caption 1"]
    expected = {"caption 0": pixels, "caption 1": pixels}
    if kind == "tar":
        with tars.tarfile.open(folder / "a.tar", "w") as tar:
            for number, text in enumerate(texts):
                tars.member(tar, f"{number}.png", data)
                if isinstance(text, bytes):
                    tars.member(tar, f"{number}.txt", text)
                else:
                    tars.member(tar, f"{number}.json", json.dumps({"caption": text}).encode())
        return Case(kind, str(folder / "a.tar"), expected)
    for number, text in enumerate(texts):
        (folder / f"{number}.png").write_bytes(data)
        if kind == "folder":
            encoded = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
            (folder / f"{number}.txt").write_bytes(encoded)
    if kind == "folder":
        return Case(kind, str(folder), expected)
    texts = [text.decode("latin-1") if isinstance(text, bytes) else text for text in texts]
    rows = [json.dumps({"path": f"{number}.png", "caption": text}) for number, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
    surrogates = any("\ud800" <= character <= "\udfff" for text in texts for character in text[:50])
    return Case(kind, str(folder / "a.jsonl"), {} if surrogates else expected, may_be_refused=surrogates)
