"""Damaged and hostile tar files."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np

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
