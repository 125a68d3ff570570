"""Layouts of clip_benchmark and of Karpathy's splits."""

import json
import re
from pathlib import Path

import benchmark_layout as layout
import captioned
import fsspec
import numpy as np
import pytest

from infcl_jax.data import BadRecordError, classes
from infcl_jax.data.sources import is_captioned
from infcl_jax.evaluation import load_benchmark

LABELS = (0, 3, 1, 1, 5)
ORDER = (0, 2, 4, 1, 3)  # of the samples, in two shards


def test_classification_has_labels_and_classes(tmp_path):
    samples = layout.classified(LABELS)
    samples[1] = {"cls": b"3\n", "webp": samples[1]["jpg"], "mask.png": b"another member"}
    source = load_benchmark(str(layout.write_benchmark(tmp_path / "wds_x", samples)), "test", "nowhere")
    assert [source[i]["label"] for i in range(5)] == [LABELS[i] for i in ORDER]
    assert [source[i]["image"] for i in range(5)] == [captioned.jpeg(i) for i in ORDER]
    templates = ("a photo of a {}.", "itap of the {}")
    assert classes(source) == (layout.NAMES, templates) and not is_captioned(source)


def test_retrieval_has_a_caption_per_line_or_a_list(tmp_path):
    texts = (b"one\ntwo \n", b"three", b'{"captions": ["four", "five"]}')
    samples = [{"jpg": captioned.jpeg(i), "json" if text[:1] == b"{" else "txt": text} for i, text in enumerate(texts)]
    folder = layout.write_benchmark(tmp_path / "x", samples, kind="retrieval", shards=1)
    source = load_benchmark(str(folder), "test", "nowhere")
    assert [source[i]["captions"] for i in range(3)] == [("one", "two"), ("three",), ("four", "five")]
    assert is_captioned(source)
    with pytest.raises(ValueError, match=r"expected a dataset with classes, got .*/x, whose type is retrieval"):
        classes(source)
    samples.append({"jpg": captioned.jpeg(3), "json": b'{"caption": null}'})
    folder = layout.write_benchmark(tmp_path / "y", samples, kind="retrieval")
    with pytest.raises(ValueError, match=r"to have an image and txt or json, got dropped .*'no caption': 1"):
        load_benchmark(str(folder), "test", "nowhere")


@pytest.mark.parametrize("kind", ["multilabel", None])
def test_arrays_are_in_the_order_of_the_samples(tmp_path, kind):
    arrays = np.arange(10).reshape(5, 2)
    samples = layout.classified(LABELS, arrays)
    source = load_benchmark(str(layout.write_benchmark(tmp_path / "x", samples, kind=kind)), "test", "nowhere")
    np.testing.assert_array_equal(source.arrays(), arrays[list(ORDER)])


@pytest.mark.parametrize("shape", ["(2,", "(10**12,)", "(1000000000000,)", "('a',)"])
def test_damaged_arrays_name_the_sample(tmp_path, shape):
    samples = layout.classified(LABELS, np.arange(10).reshape(5, 2))
    samples[1]["npy"] = samples[1]["npy"].replace(b"(2,)", shape.encode())
    source = load_benchmark(str(layout.write_benchmark(tmp_path / "x", samples)), "test", "nowhere")
    with pytest.raises(ValueError, match=r"^record \d of .*: expected an array, got "):
        source.arrays()


@pytest.mark.parametrize("count", ["0", "9" * 5000, "99999999", "-1", "many", "\u0662" * 10])
def test_numbers_of_shards(tmp_path, count):
    folder = layout.write_benchmark(tmp_path / "x", layout.classified(LABELS))
    (folder / "test" / "nshards.txt").write_text(count)
    with pytest.raises(ValueError, match=r"expected a number of shards in .*nshards\.txt, got .{1,50}$"):
        load_benchmark(str(folder), "test", "nowhere")


@pytest.mark.parametrize(
    "images", [3, {"a": 1}, [3], [[]], [{"split": [], "filename": "a"}], [{"split": 1, "filename": 2}]]
)
def test_wrong_types_of_karpathy(tmp_path, images):
    (tmp_path / "a.json").write_text(json.dumps({"images": images}))
    with pytest.raises(ValueError, match=r"^(expected images with filename|split of .* must be one of)"):
        load_benchmark(f"{tmp_path}/a.json", "test", "nowhere")


def test_a_benchmark_can_be_remote(tmp_path):
    folder = layout.write_benchmark(tmp_path / "x", layout.classified(LABELS))
    fsspec.filesystem("memory").put(str(folder), "/benchmarks/x", recursive=True)
    source = load_benchmark("memory://benchmarks/x", "test", "nowhere")
    assert [source[i]["label"] for i in range(5)] == [LABELS[i] for i in ORDER]
    assert classes(source).names == layout.NAMES


DAMAGES = {
    "1.tar": (lambda folder: (folder / "test" / "1.tar").unlink(), FileNotFoundError, r"1\.tar"),
    "label": (
        lambda folder: captioned.write_tar(
            folder / "test" / "1.tar", [("b.jpg", b"x"), ("c.jpg", b"x"), ("c.cls", b"1")]
        ),
        ValueError,
        r"expected every sample of .*/x, split test, to have an image and cls, .*no caption",
    ),
    "type": (
        lambda folder: (folder / "dataset_type.txt").write_text("detection"),
        ValueError,
        r"expected dataset_type.txt of .*/x to be one of classification, .*, got detection",
    ),
    "names": (lambda folder: (folder / "classnames.txt").unlink(), FileNotFoundError, r"classnames.txt"),
    "template": (
        lambda folder: (folder / "zeroshot_classification_templates.txt").write_text("a photo"),
        ValueError,
        r"zeroshot_classification_templates.txt, line 1: .*got 'a photo'",
    ),
    "groups": (Path.exists, ValueError, r"expected every sample of .*/x, split test, to have an image and npy"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_layout_is_refused(tmp_path, what):
    damage, error, message = DAMAGES[what]
    folder = layout.write_benchmark(tmp_path / "x", layout.classified(LABELS))
    damage(folder)
    with pytest.raises(error, match=message):
        source = load_benchmark(str(folder), "test", "nowhere")
        classes(source)
        source.arrays()


def test_a_damaged_record_is_named(tmp_path):
    samples = layout.classified(LABELS)
    samples[4]["cls"] = b"five"
    source = load_benchmark(str(layout.write_benchmark(tmp_path / "x", samples)), "test", "nowhere")
    with pytest.raises(BadRecordError, match=r"record 2 of .*/x, split test \(0.tar\).*five"):
        source[2]


ROWS = [
    ("train", "val2014", ("a",)),
    ("test", "val2014", ("b", " c ")),
    ("val", "val2014", ("d",)),
    ("restval", "train2014", ("e",)),
    ("test", None, ("f", "g", "h")),
]


def test_karpathy_splits(tmp_path):
    path = str(layout.write_karpathy(tmp_path, ROWS))
    source = load_benchmark(path, "test", "nowhere")
    assert [source[i]["captions"] for i in range(len(source))] == [("b", "c"), ("f", "g", "h")]
    assert [source[i]["image"] for i in range(2)] == [captioned.jpeg(1), captioned.jpeg(4)]
    assert is_captioned(source)
    assert load_benchmark(path, "validation", "nowhere")[0]["caption"] == "d"


def test_karpathy_images_can_be_elsewhere(tmp_path):
    path = layout.write_karpathy(tmp_path / "images", ROWS)
    moved = path.rename(tmp_path / "dataset_coco.json")
    source = load_benchmark(f"{moved}?folder={tmp_path}/images", "test", "nowhere")
    assert source[0]["image"] == captioned.jpeg(1)
    with pytest.raises(FileNotFoundError, match=r"val2014/1.jpg does not exist; name the folder of the images"):
        load_benchmark(str(moved), "test", "nowhere")


def test_karpathy_mistakes_are_named(tmp_path):
    path = layout.write_karpathy(tmp_path, ROWS)
    with pytest.raises(ValueError, match=r"expected the options folder, outside of .*\.json, got split"):
        load_benchmark(f"{path}?split=a", "test", "nowhere")
    with pytest.raises(ValueError, match="must be one of restval, test, train, val, got 'dev2'"):
        load_benchmark(str(path), "dev2", "nowhere")
    path.write_text(json.dumps({"images": [{"filename": "0.jpg", "split": "test"}]}))
    with pytest.raises(ValueError, match=re.escape("expected images with filename, split and sentences")):
        load_benchmark(str(path), "test", "nowhere")
