import io
import re

import captioned
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from infcl_jax.data import convert, load_source
from infcl_jax.data.decode import decode_example
from infcl_jax.data.encode import encode_jpeg


@pytest.fixture
def table(tmp_path):
    """A parquet file of 8 rows, one with a caption that is too long and one without a caption."""
    images = [captioned.jpeg(i) for i in range(8)]
    texts = [[f"caption {i}"] for i in range(6)] + [["a" * (2**20 + 1)], []]
    texts[2].append("another")
    parquet.write_table(pa.table({"image": images, "captions": texts}), tmp_path / "a.parquet")
    return f"{tmp_path}/a.parquet"


def test_tar_files_have_the_samples_of_the_source(table, tmp_path, caplog):
    line = convert(table, tmp_path / "tars", shard_samples=3)
    assert re.fullmatch(
        rf"{re.escape(table)}: 6 samples in [0-9.]+ s, {tmp_path}/tars; left out: 1 no caption, 1 bad record", line
    )
    assert "bad record 6 of" in caplog.text
    assert (
        captioned.read_all(load_source(f"{tmp_path}/tars", "train"))
        == captioned.read_all(load_source(table, "train"))[:6]
    )
    assert len(list((tmp_path / "tars").glob("train-*.tar"))) == 3


def test_pixels_and_evaluation_captions_survive(tmp_path):
    convert("digits", tmp_path, split="validation", shard_samples=100)
    source, written = load_source("digits", "validation"), load_source(str(tmp_path), "validation")
    assert len(written) == len(source)
    for index in (0, 5, 150):
        np.testing.assert_array_equal(decode_example(written, index)["image"], source[index]["image"])
        assert written[index]["caption"] == source[index]["caption"]
        assert set(written[index]["captions"]) == set(source[index]["captions"])


@pytest.mark.parametrize("dataset", ["table", "digits"])
def test_array_records_have_the_samples_of_the_source(table, tmp_path, dataset):
    path, split = {"table": (table, "train"), "digits": ("digits", "validation")}[dataset]
    line = convert(path, tmp_path / "photos", split=split, shard_samples=4, file_format="array_record")
    source, written = load_source(path, split), load_source("photos", split, tmp_path)
    assert f" {len(written)} samples in " in line
    assert ("; left out: 1 no caption, 1 bad record" in line) == (dataset == "table")
    assert len(list((tmp_path / "photos" / "1.0.0").glob("*.array_record-*"))) == -(-len(source) // 4)
    for index in range(len(written)):
        expected = decode_example(source, index)
        np.testing.assert_array_equal(decode_example(written, index)["image"], expected["image"])
        assert written[index]["caption"] == expected["caption"]
        assert set(written[index]["captions"]) == set(expected["captions"])
    with pytest.raises(
        ValueError, match=r"expected a new dataset, got .*photos, which exists; choose another --output"
    ):
        convert(path, tmp_path / "photos", split=split, file_format="array_record")
    with pytest.raises(
        ValueError, match="expected letters, digits and _ in the name of a TFDS dataset, got 'my-photos'"
    ):
        convert(path, tmp_path / "my-photos", split=split, file_format="array_record")


def gradient(width, height):
    """Red grows with the column, green with the row."""
    x, y = (np.arange(side) * 2 + 1 for side in (width, height))
    red, green = np.broadcast_arrays(x * 128 // width, y[:, None] * 128 // height)
    return np.stack([red, green, red], axis=2).astype(np.uint8)


def test_large_images_are_resized(tmp_path):
    sizes = [(40, 20), (20, 64), (16, 16), (9, 12), (16, 2)]
    samples = [(str(i), {"jpg": encode_jpeg(gradient(*size)), "txt": b"a"}) for i, size in enumerate(sizes)]
    samples.append(("5", {"jpg": captioned.jpeg(5)[:300], "txt": b"a"}))
    dataset = str(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples)))
    assert convert(dataset, tmp_path / "tars", max_side=16).endswith("left out: 1 bad record")
    written = load_source(f"{tmp_path}/tars", "train")
    images = [Image.open(io.BytesIO(written[index]["image"])) for index in range(5)]
    assert [image.size for image in images] == [(16, 8), (5, 16), (16, 16), (9, 12), (16, 2)]
    for index, (_, contents) in enumerate(samples[:5]):
        if index >= 2:
            assert written[index]["image"] == contents["jpg"]
        else:
            np.testing.assert_allclose(np.asarray(images[index]), gradient(*images[index].size), atol=30)


def test_an_interrupted_conversion_continues(table, tmp_path):
    line = convert(table, tmp_path / "tars", shard_samples=2)
    paths = sorted((tmp_path / "tars").glob("*.tar"))
    kept = {path: path.stat().st_mtime_ns for path in paths}
    contents = paths[1].read_bytes()
    paths[1].unlink()
    (tmp_path / "tars" / ".train-00001.tar.tmp").write_bytes(b"half of a tar file")
    assert convert(table, tmp_path / "tars", shard_samples=2).partition(";")[2] == line.partition(";")[2]
    assert paths[1].read_bytes() == contents
    assert all(path.stat().st_mtime_ns == kept[path] for path in paths if path != paths[1])


@pytest.mark.parametrize(
    "change,match",
    [
        ({"shard_samples": 0}, "expected at least 1 sample in a file, got 0"),
        ({"file_format": "zip"}, "expected file_format to be one of tar, array_record, got 'zip'"),
        ({"max_side": 0}, "expected max_side >= 1, got 0"),
        ({"max_side": 8}, r"expected an output folder for .*, 8\]"),
        ({"shard_samples": 3}, r"expected an output folder for .*, 3.*, got one of .*, 2.*; choose another"),
        ({"split": "train[:3]"}, r"expected an output folder for .*train\[:3\]"),
        ({"split": "test"}, "is one split, train, got split 'test'"),
    ],
)
def test_mistakes(table, tmp_path, change, match):
    convert(table, tmp_path / "tars", shard_samples=2)
    with pytest.raises(ValueError, match=match):
        convert(table, tmp_path / "tars", **({"shard_samples": 2} | change))


def test_output_must_be_writable(table):
    with pytest.raises(OSError, match=r"cannot write to /dev/null/x .*; choose another --output"):
        convert(table, "/dev/null/x")
