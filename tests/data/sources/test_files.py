import json
import os

import captioned
import pytest

from infcl_jax.data import BadRecordError, Corpus, QuerySource, load_source, read_judgments, read_questions
from infcl_jax.data.sources import captions, files

SPECIAL = {"FIFO": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}
READERS = [files.read_file, files.read_json, files.open_file, files.stamp, QuerySource, Corpus, read_questions]
HUGE = 50 * 2**30  # bytes


@pytest.fixture
def folder(tmp_path):
    """Three captioned images in a folder, with a table and a tar file."""
    captioned.write_csv(tmp_path / "a.csv", [(f"{i:06d}.jpg", f"caption {i}") for i in range(3)])
    captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(3)))
    return captioned.write_folder(tmp_path / "photos", captioned.samples(3))


def write_huge(path):
    """Sparse file."""
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, HUGE)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("read", [*READERS, read_judgments, lambda path: files.Files([str(path)]).read(0, 0, 1)])
def test_special_files_are_refused(tmp_path, kind, read):
    SPECIAL[kind](tmp_path / "a")
    with pytest.raises(ValueError, match=f"expected a regular file, got a {kind} at .*/a$"):
        read(str(tmp_path / "a"))


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["b.csv", "b.tsv", "b.jsonl", "b.parquet", "b.tar", "b.json"])
def test_special_datasets_are_refused(tmp_path, kind, name):
    SPECIAL[kind](tmp_path / name)
    with pytest.raises(ValueError, match=f"expected a regular file, got a {kind} at "):
        load_source(f"{tmp_path}/{name}", "train")


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("extension", ["jpg", "txt"])
def test_special_samples_are_bad_records(folder, kind, extension):
    path = folder / f"000001.{extension}"
    source = load_source(str(folder), "train")
    path.unlink()
    SPECIAL[kind](path)
    assert source[0]["caption"] == "caption 0" and source[2]["caption"] == "caption 2"
    with pytest.raises(BadRecordError, match=f"bad record 1 .*: expected a regular file, got a {kind} at "):
        source[1]


@pytest.mark.parametrize("extension,limit", [("jpg", files.LARGEST_IMAGE), ("txt", captions.LARGEST)])
def test_huge_samples_are_bad_records(folder, extension, limit):
    write_huge(folder / f"000001.{extension}")
    source = load_source(str(folder), "train")
    with pytest.raises(BadRecordError, match=f"bad record 1 .*: expected at most {limit} bytes in .*, got {HUGE}"):
        source[1]


@pytest.mark.parametrize(
    "name,match",
    [
        ("b.json", f"expected at most {files.LARGEST_TEXT} bytes in"),
        ("b.csv", r"b\.csv cannot be read: field larger than field limit"),
        ("b.jsonl", "expected lines of less than 67108864 bytes in"),
        ("b.parquet", r"b\.parquet is not a parquet file"),
        ("b.tar", r"b\.tar has no sample with an image and a caption"),
    ],
)
def test_huge_datasets_are_refused(tmp_path, name, match):
    write_huge(tmp_path / name)
    with pytest.raises(ValueError, match=match):
        load_source(f"{tmp_path}/{name}", "train")


@pytest.mark.parametrize("name", ["classes.txt", "classes.json", "templates.txt"])
def test_huge_class_files_are_refused(tmp_path, folder, name):
    (tmp_path / "cats").mkdir()
    os.rename(folder, tmp_path / "cats" / "cat")
    for path in (tmp_path / "cats" / "cat").glob("*.txt"):
        path.unlink()
    write_huge(tmp_path / "cats" / name)
    with pytest.raises(ValueError, match=f"expected at most {files.LARGEST_TEXT} bytes in .*{name}, got {HUGE}"):
        load_source(f"{tmp_path}/cats", "train")


@pytest.mark.parametrize("path", ["/proc/self/environ", "/proc/kmsg"])
def test_files_without_size_are_empty(path):
    if os.access(path, os.R_OK):
        assert files.read_file(path) == b""


@pytest.mark.parametrize("length", [2**20, 2**20 + 1])
@pytest.mark.parametrize("name", ["b.csv", "b.jsonl", "b.tar", "json.tar"])
def test_captions_of_at_most_one_mebibyte(tmp_path, folder, name, length):
    text, image = "x" * length, "photos/000000.jpg"
    if name == "b.csv":
        captioned.write_csv(tmp_path / name, [(image, text)])
    elif name == "b.jsonl":
        (tmp_path / name).write_text(json.dumps({"path": image, "text": text}))
    else:
        member = ("0.txt", text.encode()) if name == "b.tar" else ("0.json", json.dumps(text).encode())
        captioned.write_tar(tmp_path / name, [("0.jpg", captioned.jpeg(0)), member])
    source = load_source(f"{tmp_path}/{name}", "train")
    if length == 2**20:
        assert source[0]["caption"] == text
    else:
        with pytest.raises(BadRecordError, match=f"expected at most {2**20} bytes in .*, got {2**20 + 1}"):
            source[0]
