"""Fuzz test of the sources: each sample is read, dropped or bad.

More inputs than by default, with the number of samples by outcome:

    INFCL_FUZZ_ROUNDS=84 python -m pytest -q -s tests/data/sources/test_damage.py
"""

import collections
import functools
import io
import os
import re
import signal
import struct
import zlib
from typing import NamedTuple

import captioned
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from infcl_jax.data import BadRecordError, ByteTokenizer, load_source, train_iterator
from infcl_jax.data.decode import decode_example

ROUNDS = int(os.environ.get("INFCL_FUZZ_ROUNDS", "12"))  # 6 inputs each; the first 11 rounds differ in kind
SAMPLES = 6
SECONDS = 60  # no input takes a second

# Pillow warns of damaged metadata and of bombs.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
totals = collections.Counter()


@pytest.fixture(scope="module", autouse=True)
def summary():
    yield
    print(f"\n{totals.pop('inputs')} inputs; samples: {dict(totals)}")


@pytest.fixture(autouse=True)
def no_hang():
    def stop(*_):
        raise TimeoutError(f"an input takes {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def flip(data, rng):
    data = bytearray(data)
    for position in rng.integers(0, len(data), rng.integers(1, 9)):
        data[position] ^= 1 << int(rng.integers(8))
    return bytes(data)


def cut(data, rng):
    return data[: rng.integers(len(data))]


def delete(data, rng):
    start = rng.integers(len(data))
    return data[:start] + data[start + rng.integers(700) :]


def repeat(data, rng):
    start = rng.integers(len(data))
    return data[:start] + data[start : start + rng.integers(700)] + data[start:]


def overwrite(data, rng):
    start, stop = sorted(rng.integers(0, len(data) + 1, 2).tolist())
    return data[:start] + rng.integers(0, 256, stop - start, dtype=np.uint8).tobytes() + data[stop:]


BYTES = (flip, cut, delete, repeat, overwrite)


def png(width, height, *chunks):
    """PNG file of the size in its header and the given chunks."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    blocks = []
    for name, data in ((b"IHDR", header), *chunks, (b"IEND", b"")):
        blocks.append(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(blocks)


@functools.cache
def bombs():
    """Small files of very large images and texts."""
    square = io.BytesIO()
    Image.new("1", (20000, 20000)).save(square, format="png")
    zeros = zlib.compress(bytes(2**26))
    sized = bytearray(captioned.jpeg(0))
    frame = sized.index(b"\xff\xc0")
    sized[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    return (
        square.getvalue(),
        png(60000, 60000, (b"IDAT", zlib.compress(bytes(1000)))),
        png(4, 4, (b"zTXt", b"Comment\0\0" + zeros), (b"IDAT", zlib.compress(bytes(52)))),
        png(4, 4, (b"IDAT", zeros)),
        bytes(sized),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(20),
        png(1, 1, (b"IDAT", zlib.compress(bytes(4)))),
    )


class Sample(NamedTuple):
    key: str
    image: bytes
    caption: bytes
    extension: str = "jpg"


def spoil(kind, sample, rng):
    """The samples that replace a sample."""
    if kind in BYTES:
        field = ("image", "caption")[int(rng.integers(2))]
        return [sample._replace(**{field: kind(getattr(sample, field), rng)})]
    changes = {
        "wrong extension": {"extension": ("mp4", "png", "html", "JPG")[int(rng.integers(4))]},
        "swapped": {"image": sample.caption, "caption": sample.image},
        "bomb": {"image": bombs()[int(rng.integers(len(bombs())))]},
        "path traversal": {"key": ("../", "../etc/", "/")[int(rng.integers(3))] + sample.key},
        "not UTF-8": {"caption": b"caf\xe9 " + rng.integers(128, 256, 4, dtype=np.uint8).tobytes()},
    }
    return [sample, sample] if kind == "duplicate key" else [sample._replace(**changes[kind])]


KINDS = (*BYTES, "wrong extension", "swapped", "bomb", "path traversal", "not UTF-8", "duplicate key")


def write_tar(folder, samples):
    members = [member for s in samples for member in ((f"{s.key}.{s.extension}", s.image), (f"{s.key}.txt", s.caption))]
    return captioned.write_tar(folder / "a.tar", members)


def write_folder(folder, samples):
    folder /= "folder"
    folder.mkdir()
    for number, sample in enumerate(samples):
        path = folder / f"{number}.{sample.extension}"
        path.with_suffix(".txt").write_bytes(sample.caption)
        if "/" in sample.key:
            path.symlink_to("/etc/passwd")
        else:
            path.write_bytes(sample.image)
    return folder


def write_csv(folder, samples):
    rows = [b"path,caption\n"]
    for number, sample in enumerate(samples):
        outside = "/" in sample.key
        path = f"{sample.key}.jpg" if outside else f"{number}.{sample.extension}"
        if not outside:
            (folder / path).write_bytes(sample.image)
        rows.append(b'%s,"%s"\n' % (path.encode(), sample.caption.replace(b'"', b'""')))
    (folder / "a.csv").write_bytes(b"".join(rows))
    return folder / "a.csv"


def write_parquet(folder, samples):
    images = [{"bytes": sample.image, "path": f"{sample.key}.{sample.extension}"} for sample in samples]
    table = pa.table({"image": images, "caption": [sample.caption for sample in samples]})
    parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def outcomes(dataset):
    """The source, its captions by index and its bad indices; None if all is refused."""
    totals["inputs"] += 1
    try:
        source = load_source(str(dataset), "train")
    except (ValueError, FileNotFoundError) as error:
        assert "\n" not in str(error) and str(error)
        totals["all refused"] += 1
        return None
    good, bad = {}, []
    for index in range(len(source)):
        try:
            example = decode_example(source, index)
            assert example["image"].dtype == np.uint8 and example["image"].ndim == 3
            good[index] = example["captions"]
        except BadRecordError as error:
            assert re.match(rf"bad record {index} of .*, split train \(", str(error)) and "\n" not in str(error)
            bad.append(index)
    totals.update({"read": len(good), "bad": len(bad)} | getattr(source, "dropped", {}))
    return source, good, bad


WRITERS = (write_tar, write_folder, write_csv, write_parquet)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_damaged_samples(tmp_path, write, seed):
    kind, rng = KINDS[seed % len(KINDS)], np.random.default_rng(seed)
    whole = [Sample(f"{i:06d}", captioned.jpeg(i), f"caption {i}".encode()) for i in range(SAMPLES)]
    spoiled = set(rng.choice(SAMPLES, int(rng.integers(1, SAMPLES)), replace=False).tolist())
    samples = [new for i, old in enumerate(whole) for new in (spoil(kind, old, rng) if i in spoiled else [old])]
    (tmp_path / "input").mkdir()
    source, good, bad = outcomes(write(tmp_path / "input", samples))
    dropped = collections.Counter(source.dropped)
    dropped["duplicate member"] /= 2  # image and caption
    assert len(good) + len(bad) + dropped.total() == len(samples)
    assert {f"caption {i}" for i in range(SAMPLES) if i not in spoiled} <= {texts[0] for texts in good.values()}
    assert os.listdir(tmp_path) == ["input"]  # nothing is written outside
    if WRITERS[seed % len(WRITERS)] is not write:
        return
    iterator = train_iterator(source, tokenizer=ByteTokenizer(8), image_size=8, batch_size=len(source), seed=seed)
    read = set(next(iterator)["index"].tolist())
    iterator.close()
    assert read == set(good) and iterator.bad_records.indices() == bad


CONTAINERS = ("a.tar", "a.csv", "a.tsv", "a.jsonl", "a.parquet", "mixture.json")


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("seed", range(max(1, ROUNDS // 3)))
def test_damaged_files(tmp_path, name, seed):
    rng = np.random.default_rng(seed)
    samples = captioned.samples(SAMPLES)
    captioned.write_folder(tmp_path, samples)
    rows = [(f"{key}.jpg", contents["txt"].decode()) for key, contents in samples]
    path = tmp_path / name
    if name == "a.tar":
        captioned.write_tar(path, captioned.members(samples), format=seed % 3)
    elif name == "a.parquet":
        images = [contents["jpg"] for _, contents in samples]
        parquet.write_table(pa.table({"image": images, "text": [text for _, text in rows]}), path)
    elif name == "a.jsonl":
        path.write_text("".join(f'{{"path": "{image}", "text": "{text}"}}\n' for image, text in rows))
    elif name == "mixture.json":
        path.write_text(f'[{{"path": "{tmp_path}", "weight": 1, "max_samples": 3}}]')
    else:
        captioned.write_csv(path, rows, delimiter="\t" if name == "a.tsv" else ",")
    path.write_bytes(BYTES[seed % len(BYTES)](path.read_bytes(), rng))
    result = outcomes(path)
    if name == "a.tar" and result is not None:
        source, good, bad = result
        assert source._index.problems or len(good) + len(bad) + sum(source.dropped.values()) >= SAMPLES


def test_members_with_unusual_names(tmp_path):
    contents = {"jpg": captioned.jpeg(0), "txt": b"a"}
    names = ["../../etc/passwd", "/etc/shadow", "C:\\x", "a/../b", " ", "-rf", "a\nb", "grün", "x" * 90, "..", "a//b"]
    source, good, bad = outcomes(
        captioned.write_tar(tmp_path / "a.tar", captioned.members([(n, contents) for n in names]))
    )
    assert len(good) == len(source) == 10 and not bad  # ".." has no key
