"""Damaged and hostile tables."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.faults import images
from tests.faults.case import BYTES, Case, choose

KINDS = ("bytes", "columns", "nul", "types", "huge", "missing", "empty", "quotes", "encoding", "ragged")


def draw(rng: np.random.Generator, folder: Path) -> Case:
    """Write a table of damaged or hostile rows and its images."""
    kind, extension = choose(KINDS, rng), choose(("csv", "tsv", "jsonl", "parquet"), rng)
    path, pixels = folder / f"a.{extension}", [images.rgb(rng) for _ in range(4)]
    files = [images.encoded(images.Image.fromarray(p), choose(images.LOSSLESS, rng)) for p in pixels]
    for i, data in enumerate(files):
        (folder / f"{i}.png").write_bytes(data)
    names: list = [f"{i}.png" for i in range(4)]
    captions: list = [f"caption {i}" for i in range(4)]
    expected: dict[str, np.ndarray | None] = dict(zip(captions, pixels, strict=True))
    columns, may_be_refused = ["path", "caption"], kind in ("bytes", "columns", "types", "empty", "quotes", "ragged")
    if kind == "columns":
        columns = choose((["a", "b"], ["path", "path"], ["caption", "path"], ["", "caption"], ["PATH", "TITLE"]), rng)
        expected = {}
    elif kind == "nul":
        captions[1] = "a\0b"
        expected.pop("caption 1")
    elif kind == "types":
        captions[1] = choose((3, None, True, ["a", "b"], {"text": "a"}, 1.5, [1, 2], []), rng)
        expected = {}
    elif kind == "huge":
        captions[1] = "word " * 200_000
        expected.pop("caption 1")
    elif kind == "missing":
        names[1], names[2] = "gone.png", choose(("", "../input", ".", "/", "a\0b", "x" * 5000), rng)
        expected = {caption: expected[caption] for caption in ("caption 0", "caption 3")}
    elif kind == "quotes":
        captions[1] = choose(('a "quoted" word', '"', 'a"b', "line\nbreak", "tab\tand, comma", "\r\n"), rng)
        expected = {}
    elif kind == "ragged":
        captions[1] = "a,b,c,d\te\tf"
        expected = {}
    _write(path, columns, names, captions, files if rng.random() < 0.5 else None)
    data = path.read_bytes()
    if kind == "bytes":
        path.write_bytes(choose(BYTES, rng)(data, rng))
        expected = {}
    elif kind == "empty":
        path.write_bytes(
            choose((b"", b"\n", data[:15], b"\0" * 100, b"path,caption\n", b"{}\n", b"[]", b"null\n"), rng)
        )
        expected = {}
    elif kind == "encoding" and extension != "parquet":
        path.write_bytes(data.replace(b"caption 1", b"caf\xe9 1"))
        expected.pop("caption 1")
        if extension == "jsonl":  # Arrow refuses the file
            expected, may_be_refused = {}, True
    return Case(f"{kind} {extension}", str(path), expected, may_be_refused=may_be_refused)


def _write(path: Path, columns: list[str], names: list, captions: list, files: list[bytes] | None) -> None:
    """Write a table; parquet may have the images themselves."""
    if path.suffix == ".parquet":
        types = {type(caption) for caption in captions}
        texts = captions if types == {str} else [json.dumps(caption) for caption in captions]
        arrays = [pa.array(names if files is None else files), pa.array(texts)]
        parquet.write_table(pa.Table.from_arrays(arrays, columns), path, row_group_size=2)
    elif path.suffix == ".jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(names, captions, strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        separator = "\t" if path.suffix == ".tsv" else ","
        lines = [separator.join(map(str, row)) for row in (columns, *zip(names, captions, strict=True))]
        path.write_text("\n".join(lines) + "\n")
