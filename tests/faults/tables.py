"""Damaged and hostile tables."""

import json
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.faults import images
from tests.faults.case import BYTES, Case, choose

# Lines at which Arrow 26 crashes.
_CRASHES = (
    b"null\n",
    b"\xef\xbb\xbfnull\n",
    b"{}\rnull\n",
    b'{"path": "0.png", "caption": ' + b"[" * 2500 + b"]" * 2500 + b"}\n",
    b'{"path": "0.png", "caption":\n' + b"[\n" * 20_000 + b"]\n" * 20_000 + b"}\n",
)
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
            choose((b"", b"\n", data[:15], b"\0" * 100, b"path,caption\n", b"{}\n", b"[]", *_CRASHES), rng)
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


_ELSEWHERE = (
    "file://{0}/0.png", "local://{0}/0.png", "FILE://{0}/0.png", "images/file://{0}/0.png",
    "simplecache::file://{0}/0.png", "filecache::file://{0}/0.png", "blockcache::{0}/0.png", "simplecache::{0}/0.png",
    "dir://0.png::file://{0}", "zip://0.png::file://{0}/a.csv", "tar://0.png::{0}/a.csv", "reference://0.png", "reference://::{0}/a.jsonl",
    "memory://faults/0.png", "memory:///faults/0.png", "ftp://127.0.0.1:1/0.png", "sftp://127.0.0.1:1/0.png",
    "ssh://127.0.0.1:1/0.png", "http://127.0.0.1:1/0.png", "https://127.0.0.1:1/0.png", "github://a:b@/0.png",
    "git://{0}:0.png", "gs://bucket/0.png", "gcs://bucket/0.png", "s3://bucket/0.png", "az://bucket/0.png",
    "abfs://bucket/0.png", "hdfs://host/0.png", "webhdfs://127.0.0.1:1/0.png", "smb://127.0.0.1:1/0.png",
    "hf://datasets/a/b/0.png", "jupyter://127.0.0.1:1/0.png", "asynclocal://{0}/0.png", "generic://{0}/0.png",
    "0.png::1.png", "::0.png", "file:{0}/0.png", "data:image/png;base64,AAAA",
)  # fmt: skip
_DAMAGED = (
    "~/0.png", "~root/0.png", "a\0b.png", "0.png\0.png", "0.png/", "0.png/..", ".", "..", "/", " ", "*.png",
    "{{0,1}}.png", "%30.png", "0.png?outside=true", "\\\\host\\0.png", "C:\\0.png", "/dev/zero", "/dev/stdin",
    "/dev/null", "/dev/tty", "/proc/self/mem", "/proc/self/fd/0", "/proc/kmsg", "/proc/self/environ",
    "/sys/kernel/notes",
)  # fmt: skip
_LONG = ("x" * 5000, "a/" * 3000 + "0.png", "../" * 2000 + "0.png")
HOSTILE = (*_ELSEWHERE, *_DAMAGED, *_LONG)


def draw_paths(rng: np.random.Generator, folder: Path) -> Case:
    """Write a table that names an image inside its folder, one outside, and hostile paths."""
    extension, pixels = choose(("csv", "tsv", "jsonl", "parquet"), rng), [images.rgb(rng) for _ in range(2)]
    (folder / "set").mkdir()
    for path, data in ((folder / "set/0.png", pixels[0]), (folder / "outside.png", pixels[1])):
        path.write_bytes(images.encoded(images.Image.fromarray(data), "PNG"))
    fsspec.filesystem("memory").pipe("/faults/0.png", (folder / "set/0.png").read_bytes())
    (folder / "set/link.png").symlink_to(folder / "outside.png")
    hostile = [path.format(folder / "set") for path in rng.choice(HOSTILE, 4, replace=False)]
    outside = [choose(("../outside.png", f"{folder}/outside.png", "x/../../outside.png", "../set/../outside.png"), rng)]
    option = choose(("", "?outside=false", "?outside=true"), rng)
    if option == "?outside=true":
        hostile, outside = [path for path in hostile if "://" not in path], [str(folder / "outside.png")]
    elif option == "?outside=false" and rng.random() < 0.5:
        hostile, outside = [], []
    names = ["0.png", "link.png", *outside, *hostile]
    captions = ["inside", "link", *(["outside"] * len(outside)), *(f"hostile {i}" for i in range(len(hostile)))]
    path = folder / "set" / f"a.{extension}"
    _write(path, ["path", "caption"], names, captions, None)
    refused = [caption for caption in captions if caption.startswith("hostile")]
    if option == "?outside=false":
        refused += ["link", "outside"]
        expected = {} if outside else {"inside": pixels[0]}
        return Case(f"paths {extension}{option}", f"{path}{option}", expected, refused, may_be_refused=bool(outside))
    expected = {"inside": pixels[0], "link": pixels[1]} | ({} if outside[0][0] == "x" else {"outside": pixels[1]})
    return Case(f"paths {extension}{option}", f"{path}{option}", expected, refused)
