"""Tables that other programs write (tests/golden/make_tables.py)."""

import shutil
from pathlib import Path

import captioned
import pytest

from infcl_jax.data import classes, load_source

GOLDEN = Path(__file__).parents[2] / "golden" / "tables"
CAPTIONS = ("a zebra", 'an "ant", seen\nfrom above', "a zebra, again", "two ants")
LISTS = [(caption, f"{i}: it's") for i, caption in enumerate(CAPTIONS)]


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(captioned.jpeg(i))
    return tmp_path


@pytest.mark.parametrize("name", ["pandas.csv", "pandas.tsv", "pandas_category.parquet"])
def test_texts_of_pandas(folder, name, caplog):
    examples = captioned.read_all(load_source(f"{folder}/{name}", "train"))
    assert [example["captions"] for example in examples] == [(caption,) for caption in CAPTIONS]
    assert [example["image"] for example in examples] == [captioned.jpeg(i) for i in range(4)]
    assert not caplog.records


@pytest.mark.parametrize("name", ["pandas_lists.csv", "pandas_json.csv", "pandas_arrays.csv"])
def test_lists_in_cells_of_pandas(folder, name):
    assert [example["captions"] for example in captioned.read_all(load_source(f"{folder}/{name}", "train"))] == LISTS


@pytest.mark.parametrize("name", ["hugging_face_paths.parquet", "hugging_face.jsonl"])
def test_image_paths_of_hugging_face(folder, name):
    examples = captioned.read_all(load_source(f"{folder}/{name}", "train"))
    assert [example["captions"] for example in examples] == LISTS
    assert [example["image"] for example in examples] == [captioned.jpeg(i) for i in range(4)]


def test_embedded_images_and_class_labels_of_hugging_face(folder):
    source = load_source(f"{folder}/train-00000-of-00001.parquet", "train")
    examples = captioned.read_all(source)
    assert [example["captions"] for example in examples] == LISTS
    assert all(example["image"].startswith(b"\x89PNG") for example in examples)
    assert [example["label"] for example in examples] == [0, 1, 0, 1]
    assert classes(source).names == ("zebra", "fire ant")
    (folder / "classes.txt").write_text("own\nnames\n")
    assert classes(load_source(f"{folder}/train-00000-of-00001.parquet", "train")).names == ("own", "names")


def test_images_and_paths_in_one_table_of_hugging_face(folder):
    source = load_source(f"{folder}/hugging_face_mixed.parquet", "train")
    images = [example["image"] for example in captioned.read_all(source)]
    assert images[::2] == [captioned.jpeg(0), captioned.jpeg(2)] and images[1].startswith(b"\x89PNG")
    assert source.dropped == {"no image": 1}


@pytest.mark.parametrize(("kind", "start"), [("webp", b"RIFF"), ("png", b"\x89PNG")])
def test_failed_downloads_of_img2dataset(folder, kind, start):
    source = load_source(f"{folder}/img2dataset_{kind}", "train")
    examples = captioned.read_all(source)
    assert [example["captions"] for example in examples] == [("a",), ("d",)]
    assert all(example["image"].startswith(start) for example in examples)
    assert source.dropped == {"no image": 1, "no caption": 1}
