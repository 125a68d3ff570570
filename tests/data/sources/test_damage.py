"""Fuzz test of the sources: every sample is read, dropped or bad."""

import os
import re

import captioned
import numpy as np
import pytest

from infcl_jax.data import BadRecordError, load_source
from infcl_jax.data.decode import decode_example

ROUNDS = int(os.environ.get("INFCL_FUZZ_ROUNDS", "12"))  # random inputs per kind of source
SAMPLES = 6

# Pillow warns of damaged metadata.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def damage(data, rng):
    """Flip bits, cut, repeat or overwrite bytes."""
    data = bytearray(data)
    kind = rng.integers(5)
    start, stop = sorted(rng.integers(0, len(data) + 1, 2).tolist())
    if kind == 0:
        for position in rng.integers(0, len(data), rng.integers(1, 9)):
            data[position] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[start:]
    elif kind == 2:
        del data[start : min(stop, start + 700)]
    elif kind == 3:
        data[start:start] = data[start : min(stop, start + 700)]
    else:
        data[start:stop] = rng.integers(0, 256, stop - start, dtype=np.uint8).tobytes()
    return bytes(data)


def outcomes(dataset):
    """Count readable and bad samples; a source that refuses its files has none."""
    try:
        source = load_source(str(dataset), "train")
    except (ValueError, FileNotFoundError) as error:
        assert "\n" not in str(error) and str(error)
        return None
    good = bad = 0
    for index in range(len(source)):
        try:
            example = decode_example(source, index)
            assert example["image"].dtype == np.uint8 and example["image"].ndim == 3 and example["captions"]
            good += 1
        except BadRecordError as error:
            assert re.match(rf"bad record {index} of .*, split train \(", str(error)) and "\n" not in str(error)
            bad += 1
    assert good + bad == len(source)
    return source, good, bad


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_damaged_tar_files(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(SAMPLES)), format=seed % 3)
    path.write_bytes(damage(path.read_bytes(), rng))
    result = outcomes(path)
    if result is not None:
        source, good, bad = result
        assert source._index.problems or good + bad + sum(source.dropped.values()) >= SAMPLES


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_damaged_members(tmp_path, seed):
    rng = np.random.default_rng(seed)
    samples = captioned.samples(SAMPLES)
    for _, contents in samples[::2]:
        extension = ("jpg", "txt")[int(rng.integers(2))]
        contents[extension] = damage(contents[extension], rng)
    source, good, bad = outcomes(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples)))
    assert good + bad + sum(source.dropped.values()) == SAMPLES and good >= SAMPLES // 2
    captioned.write_folder(tmp_path / "folder", samples)
    source, good, bad = outcomes(tmp_path / "folder")
    assert good + bad == SAMPLES and good >= SAMPLES // 2


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "mixture.json"])
@pytest.mark.parametrize("seed", range(max(1, ROUNDS // 3)))
def test_damaged_tables(tmp_path, name, seed):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rng = np.random.default_rng(seed)
    captioned.write_folder(tmp_path, captioned.samples(SAMPLES))
    rows = [(f"{i:06d}.jpg", f"caption {i}") for i in range(SAMPLES)]
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(
            pa.table({"image": [captioned.jpeg(i) for i in range(SAMPLES)], "text": [c for _, c in rows]}), path
        )
    elif name.endswith("jsonl"):
        path.write_text("".join(f'{{"path": "{image}", "text": "{caption}"}}\n' for image, caption in rows))
    elif name.endswith("json"):
        path.write_text(f'[{{"path": "{tmp_path}", "weight": 1, "max_samples": 3}}]')
    else:
        captioned.write_csv(path, rows, delimiter="\t" if name.endswith("tsv") else ",")
    path.write_bytes(damage(path.read_bytes(), rng))
    outcomes(path)


def test_members_with_unusual_names(tmp_path):
    contents = {"jpg": captioned.jpeg(0), "txt": b"a"}
    names = ["../../etc/passwd", "/etc/shadow", "C:\\x", "a/../b", " ", "-rf", "a\nb", "grün", "x" * 90, "..", "a//b"]
    source, good, bad = outcomes(
        captioned.write_tar(tmp_path / "a.tar", captioned.members([(n, contents) for n in names]))
    )
    assert good + bad == good == len(source) == 10  # ".." has no key
    assert os.listdir(tmp_path.parent) and not (tmp_path.parent / "etc").exists()


def test_wrong_extensions_and_duplicate_keys(tmp_path):
    contents = {"jpg": captioned.jpeg(0), "txt": b"a"}
    swapped = {"jpg": b"a", "txt": captioned.jpeg(0)}
    upper = {"JPG": captioned.jpeg(0), "TXT": b"a"}
    page = {"png": b"<html>404</html>", "txt": b"a"}
    samples = [
        ("0", contents),
        ("1", swapped),
        ("2", upper),
        ("3", page),
        ("0", contents),
        ("4", {"mp4": b"a", "txt": b"a"}),
    ]
    source, good, bad = outcomes(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples)))
    assert (good, bad) == (2, 2)
    assert source.dropped == {"duplicate member": 2, "no image": 1}
