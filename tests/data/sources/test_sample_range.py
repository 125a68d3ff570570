import itertools
import json
import pickle

import captioned
import pyarrow as pa
import pytest
from pyarrow import parquet

from infcl_jax.data import BadRecordError, load_source
from infcl_jax.data.sources.sample_range import by_image

IMAGES = [captioned.jpeg(i) for i in range(3)]
# Captions of each image, and the image of each row of a table.
CAPTIONS, ROWS = (("a", "b"), ("c",), ("d", "e", "f")), (1, 0, 2, 2, 0, 2)


def rows():
    """Image number and caption of each row."""
    captions = [iter(texts) for texts in CAPTIONS]
    return [(image, next(captions[image])) for image in ROWS]


def write_csv(folder):
    names = ("{}.jpg", "./{}.jpg", f"{folder}/{{}}.jpg")
    table = [(name.format(image), text) for (image, text), name in zip(rows(), itertools.cycle(names), strict=False)]
    return captioned.write_csv(folder / "rows.csv", table)


def write_parquet(folder, struct):
    values = [{"bytes": IMAGES[i], "path": "same.jpg"} if struct else IMAGES[i] for i, _ in rows()]
    table = pa.table({"image": values, "text": [text for _, text in rows()]})
    parquet.write_table(table, folder / "rows.parquet", row_group_size=2)
    return folder / "rows.parquet"


def write_two_tables(folder):
    for number in (0, 1):
        table = [(f"{image}.jpg", text) for image, text in rows()[3 * number :][:3]]
        captioned.write_csv(folder / f"{number}.csv", table)
    return f"{folder}/0.csv::{folder}/1.csv"


def write_mixture(folder):
    (folder / "m.json").write_text(json.dumps([{"path": str(write_csv(folder)), "weight": 1}]))
    return folder / "m.json"


WRITERS = {
    "paths": write_csv,
    "embedded": lambda folder: write_parquet(folder, struct=False),
    "structs": lambda folder: write_parquet(folder, struct=True),
    "two tables": write_two_tables,
    "mixture": write_mixture,
}


@pytest.fixture
def folder(tmp_path):
    return captioned.write_folder(tmp_path, [(str(i), {"jpg": image}) for i, image in enumerate(IMAGES)])


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_of_an_image_are_joined(folder, kind):
    rows = load_source(str(WRITERS[kind](folder)), "train")
    source = by_image(rows)
    assert (len(rows), len(source)) == (6, 3)
    for image, example in zip((1, 0, 2), captioned.read_all(source), strict=True):
        captions = CAPTIONS[image]
        assert example == {"image": IMAGES[image], "caption": captions[0], "captions": captions, "label": -1}
    assert [source.key(i) for i in range(3)] == [rows.key(i) for i in (0, 1, 2)]
    assert pickle.loads(pickle.dumps(source))[2] == source[2]


def test_ranges_are_joined_alone(folder):
    source = by_image(load_source(str(write_csv(folder)), "train[1:5]"))
    assert [example["captions"] for example in captioned.read_all(source)] == [("a", "b"), ("d", "e")]


def test_sources_without_repeated_images_stay(folder):
    captioned.write_csv(folder / "a.csv", [("0.jpg", "a"), ("1.jpg", "b")])
    for source in (load_source(f"{folder}/a.csv", "train"), load_source("digits", "validation")):
        assert by_image(source) is source


def test_an_image_with_a_damaged_row_is_a_bad_record(folder):
    (folder / "a.csv").write_bytes(b"path,text\n0.jpg,a\n0.jpg,\xff\n1.jpg,b\n")
    source = by_image(load_source(f"{folder}/a.csv", "train"))
    assert source[1]["captions"] == ("b",)
    with pytest.raises(BadRecordError, match=r"bad record 1 of .*a\.csv"):
        source[0]
