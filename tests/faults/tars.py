"""Damaged and hostile tar files."""

import io
import json
import os
import tarfile
import zlib
from pathlib import Path

import numpy as np

from infcl_jax.data import load_source
from infcl_jax.data.sources import tar_index
from tests.faults import images
from tests.faults.case import BYTES, Case, choose

NAMES = ("../../etc/passwd", "/etc/shadow", "a/../b", " ", "-rf", "a\nb", "grün", "x" * 300, "..", "a//b", "C:\\x")


def member(tar: tarfile.TarFile, name: str, data: bytes, **fields) -> None:
    """Add a member; `fields` change its header."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def draw(rng: np.random.Generator, folder: Path) -> Case:
    """Write a tar file of four intact samples and damaged or hostile ones."""
    kinds = ("bytes", "header", "missing", "duplicate", "names", "links", "sparse", "pax", "captions", "empty", "many")
    kind, path = choose(kinds, rng), folder / "a.tar"
    pixels = [images.rgb(rng) for _ in range(4)]
    files = [images.encoded(images.Image.fromarray(p), choose(images.LOSSLESS, rng)) for p in pixels]
    expected: dict[str, np.ndarray | None] = {f"caption {i}": p for i, p in enumerate(pixels)}
    refused: list[str] = []
    formats = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    long_names = kind in ("names", "pax")  # which ustar cannot store
    with tarfile.open(path, "w", format=choose(formats[1:] if long_names else formats, rng)) as tar:
        if kind == "links":
            for name, kind_of_member in (("l", tarfile.SYMTYPE), ("h", tarfile.LNKTYPE), ("d", tarfile.DIRTYPE)):
                member(tar, f"{name}.jpg", b"", type=kind_of_member, linkname="/etc/passwd")
                member(tar, f"{name}.txt", b"link")
        for i, data in enumerate(files):
            if kind == "missing" and i == 1:
                expected.pop("caption 1")
            elif kind == "captions" and i == 1:
                spoiled = (
                    b"caf\xe9",
                    b"\xff\xfe\0a",
                    json.dumps({"caption": "\ud800"}).encode(),
                    b'{"caption": 3}',
                    b"{",
                )
                caption = choose(spoiled, rng)
                member(tar, f"{i}.{'json' if caption[:1] == b'{' else 'txt'}", caption)
                expected.pop("caption 1")
            else:
                member(tar, f"{i}.txt", f"caption {i}".encode())
            name = "extension" if kind == "missing" and i == 2 else "png"
            if name == "extension":
                expected.pop("caption 2")
            member(tar, f"{i}.{name}", data)
            if kind == "duplicate":
                member(tar, f"{i}.png", images.encoded(images.Image.new("RGB", (5, 5)), "PNG"))
                member(tar, f"{i}.txt", b"second")
            if kind == "pax":
                headers = {"comment": "x" * int(rng.integers(1, 5000)), "path": f"long/{'y' * 200}{i}.other"}
                member(tar, "z", b"data", pax_headers=headers)
        if kind == "names":
            for name in NAMES:
                member(tar, f"{name}.png", files[0])
                member(tar, f"{name}.txt", b"odd name")
        if kind == "sparse":
            member(tar, "s.png", files[0], type=tarfile.GNUTYPE_SPARSE)
            member(tar, "s.txt", b"sparse")
        if kind == "many":
            for i in range(300):
                member(tar, f"unused{i}", b"")
    data = path.read_bytes()
    if kind == "bytes":
        path.write_bytes(choose(BYTES, rng)(data, rng))
        return Case(kind, str(path), {}, may_be_refused=True)
    if kind == "empty":
        path.write_bytes(choose((b"", bytes(1024), bytes(512), data[:100], b"no tar file" * 100), rng))
        return Case(kind, str(path), {}, may_be_refused=True)
    if kind == "header":  # of the first sample
        changed = bytearray(data)
        changed[int(rng.choice([0, 100, 124, 136, 148, 156, 257]))] ^= 1 + int(rng.integers(255))
        path.write_bytes(changed)
        expected.pop("caption 0")
    return Case(kind, str(path), expected, refused)


_DEEP = b"[" * 100_000
_HEADERS: tuple = (
    b"", b"{", b"null", b"3", b'"shards"', b"[]", b"{}", b"caf\xe9", b"\xff\xfe{\0}\0", _DEEP, b'{"shards": ' + _DEEP,
    b"NaN", b'{"shards": 1e999}', b'{"shards": ' + b"9" * 5000 + b"}", {"shards": None}, {"shards": 3},
    {"shards": "abcd"}, {"shards": {}}, {"shards": []}, {"shards": [[]]}, {"shards": [None]}, {"shards": [3]},
    {"shards": ["abcde"]},
)  # fmt: skip
# Field of a shard and its value: size, modification time, samples, dropped samples by reason, dotted name, problem.
_FIELDS = (
    (0, -1), (0, 2**70), (0, "9"), (0, 1.5), (0, None), (1, 3), (1, None), (1, ["x"]), (2, -1), (2, 0), (2, 3), (2, 5),
    (2, 10**6), (2, 2**62), (2, 10**30), (2, "4"), (2, 4.0), (2, None), (2, [4]), (3, None), (3, []), (3, "no"),
    (3, {"x": "y"}), (3, {"x": None}), (3, {"x": [1]}), (3, {"x": -1}), (3, {"x": 2**63}),
    (3, {"x": 10**4299}), (4, 3), (4, []), (5, 3), (5, []), (5, {"x": 1}), (5, True), (6, "one more"),
)  # fmt: skip
_ENTRIES = tuple((name, value) for name in tar_index.ENTRY_DTYPE.names for value in (0, 1, 127, 255, 2**32 - 1))
_SIZES = (0, 1, 2**31, 2**63, 2**64 - 1)


def index_file(header: bytes, entries: bytes, size: int | None = None) -> bytes:
    """Return an index with the right checksum, and the given size in place of that of the header."""
    text = header + bytes(-(len(header) + 21) % 64)
    size = len(header) if size is None else size
    checksum = zlib.crc32(text + entries)
    return tar_index._MAGIC + size.to_bytes(8, "little") + checksum.to_bytes(4, "little") + text + entries


def draw_index(rng: np.random.Generator, folder: Path) -> Case:
    """Write an intact tar file with a damaged or hostile index."""
    pixels = [images.rgb(rng) for _ in range(4)]
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i, p in enumerate(pixels):
            member(tar, f"{i}.png", images.encoded(images.Image.fromarray(p), "PNG"))
            member(tar, f"{i}.txt", f"caption {i}".encode())
    expected: dict[str, np.ndarray | None] = {f"caption {i}": p for i, p in enumerate(pixels)}
    load_source(str(folder / "a.tar"), "train")
    (path,) = folder.glob(".tar_index_*")
    data = path.read_bytes()
    header, entries = data[21:].partition(b"\0")[0], data[-4 * tar_index.ENTRY_DTYPE.itemsize :]
    kind = choose(("bytes", "header", "field", "entries", "size", "old"), rng)
    if kind == "bytes":
        path.write_bytes(choose(BYTES, rng)(data, rng))
    elif kind == "header":
        changed = choose(_HEADERS, rng)
        path.write_bytes(index_file(changed if isinstance(changed, bytes) else json.dumps(changed).encode(), entries))
    elif kind == "field":
        content = json.loads(header)
        field, value = choose(_FIELDS, rng)
        content["shards"][0][field : field + 1] = [value]
        path.write_bytes(index_file(json.dumps(content).encode(), entries))
    elif kind == "entries":  # with the right checksum, as only an attacker writes it
        array = np.frombuffer(entries, tar_index.ENTRY_DTYPE).copy()
        field, value = choose(_ENTRIES, rng)
        array[field] = min(value, np.iinfo(array[field].dtype).max)
        path.write_bytes(index_file(header, array.tobytes()))
        expected = {}
    elif kind == "size":
        path.write_bytes(index_file(header, entries, choose((*_SIZES, len(header) - 1, len(header) + 1), rng)))
    else:
        path.write_bytes(b"infcltar3" + data[9:])
    os.utime(path)
    return Case(f"index {kind}", str(folder / "a.tar"), expected, may_be_refused=kind == "entries")
