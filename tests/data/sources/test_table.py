import json
import pickle

import captioned
import pyarrow as pa
import pytest
from captioned import captions, load
from pyarrow import parquet

from infcl_jax.data import BadRecordError
from infcl_jax.data.sources import columns

ROWS = [(f"images/{i:06d}.jpg", f'caption {i}, "quoted"\nand a second line') for i in range(4)]
CAPTIONS = [row[1] for row in ROWS]


@pytest.fixture
def folder(tmp_path):
    captioned.write_folder(
        tmp_path, [(f"images/{key}", {"jpg": contents["jpg"]}) for key, contents in captioned.samples(4)]
    )
    return tmp_path


def as_jsonl(path):
    path.write_text("".join(json.dumps({"path": p, "text": c}) + "\n" for p, c in ROWS))


def as_parquet(path):
    parquet.write_table(pa.table({"path": [p for p, _ in ROWS], "text": [c for _, c in ROWS]}), path)


WRITERS = {
    "a.csv": lambda path: captioned.write_csv(path, ROWS),
    "a.tsv": lambda path: captioned.write_csv(path, ROWS, ("image", "title"), delimiter="\t"),
    "tabs.csv": lambda path: captioned.write_csv(path, ROWS, ("Filepath", "Title"), delimiter="\t"),
    "a.jsonl": as_jsonl,
    "a.parquet": as_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format(folder, name):
    WRITERS[name](folder / name)
    source = load(folder / name)
    assert captions(source) == CAPTIONS
    assert [source[i]["image"] for i in range(4)] == [captioned.jpeg(i) for i in range(4)]
    assert pickle.loads(pickle.dumps(source))[2] == source[2]


def test_utf_8_with_byte_order_mark(folder):
    text = "path,caption\nimages/000000.jpg,grün 猫\n".encode("utf-8-sig")
    (folder / "a.csv").write_bytes(text)
    assert captions(load(folder / "a.csv")) == ["grün 猫"]


@pytest.mark.parametrize("struct", [True, False])
def test_parquet_with_images(tmp_path, struct):
    images = [captioned.jpeg(i) for i in range(7)]
    column = [{"bytes": image, "path": f"{i}.jpg"} for i, image in enumerate(images)] if struct else images
    texts = [[f"a{i}", f"b{i}"] for i in range(7)]
    for number, rows in enumerate((slice(0, 5), slice(5, 7))):
        path = tmp_path / f"train-{number:05d}-of-00002.parquet"
        parquet.write_table(pa.table({"image": column[rows], "captions": texts[rows]}), path, row_group_size=2)
    source = load(tmp_path)
    assert [source[i]["captions"] for i in range(7)] == [(f"a{i}", f"b{i}") for i in range(7)]
    assert [source[i]["image"] for i in (6, 0, 3, 5, 1, 2, 4)] == [images[i] for i in (6, 0, 3, 5, 1, 2, 4)]


def test_columns_and_folder_can_be_chosen(folder, tmp_path):
    rows = [(str(i), f"{i:06d}.jpg", f"title {i}", f"alt {i}") for i in range(4)]
    (tmp_path / "tables").mkdir()
    captioned.write_csv(tmp_path / "tables" / "a.csv", rows, ("path", "picture", "Title", "alt text"))
    source = load(f"{tmp_path}/tables/a.csv?image=picture&caption=alt text,Title&folder={folder}/images")
    assert source[2]["captions"] == ("alt 2", "title 2") and source[2]["image"] == captioned.jpeg(2)


def test_incomplete_and_damaged_rows_are_dropped_and_counted(folder, caplog):
    text = "path,caption\nimages/000000.jpg,a\n,b\nimages/000001.jpg,\nc,d,e\nimages/000002.jpg,f\n"
    (folder / "a.csv").write_text(text)
    source = load(folder / "a.csv")
    assert captions(source) == ["a", "f"]
    assert source.dropped == {"damaged row": 1, "no image": 1, "no caption": 1}
    assert "2 samples, dropped: 1 damaged row, 1 no image, 1 no caption" in caplog.text


def test_damaged_rows_name_the_table_and_the_image(folder):
    (folder / "a.csv").write_bytes(b"path,caption\nmissing.jpg,a\nimages/000001.jpg,\xff\xfe\nimages,b\n")
    source = load(folder / "a.csv")
    with pytest.raises(
        BadRecordError, match=r"bad record 0 of .*a\.csv, split train \(a\.csv, missing\.jpg\): FileNot"
    ):
        source[0]
    with pytest.raises(
        BadRecordError, match=r"bad record 1 .*\(a\.csv, images/000001\.jpg\): .*not UTF-8: byte 0 is 0xff"
    ):
        source[1]
    with pytest.raises(BadRecordError, match=r"bad record 2 "):
        source[2]


@pytest.mark.parametrize(
    "text,option,match",
    [
        ("path,comment\na,b\n", "", r"no caption column; its columns are path, comment: name one with \?caption="),
        ("where,caption\na,b\n", "", r"no image column; its columns are where, caption: name one with \?image="),
        ("path,caption\na,b\n", "?caption=x", r"a\.csv has no caption column 'x'; its columns are path, caption"),
        ("path,caption\na,b\n", "?images=x", "the options image, caption, label, folder, outside of .*, got images"),
        ("path,caption,path\na,b,c\n", "", "a.csv has several columns named 'path'"),
        ("path,caption\n", "", "a.csv has no row with an image and a caption"),
        ("path,caption\n,b\n", "", "a.csv has no row with an image and a caption"),
        ("path,caption\na,b\nc,d\n", "", r"a\.csv: none of the first 2 images exists, the first is /.*/a; name their"),
        ("path,caption\na,b\n", "?folder=/x", "none of the first 1 images exists, the first is /x/a; name their"),
        ("", "", "a.csv has no image column"),
        ("url,caption\nhttps://x/a.jpg,b\n", "", r"a\.csv has URLs in its image column 'url'; .* img2dataset"),
        (b"p\xff,caption\na,b\n", "", "a.csv cannot be read: .* check that it is a table in UTF-8"),
    ],
)
def test_mistakes(tmp_path, text, option, match):
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=match) as error:
        load(f"{tmp_path}/a.csv{option}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_other_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"garbage")
    with pytest.raises(ValueError, match=rf"{name}(, got b'garbage'| is not a parquet file: )"):
        load(tmp_path / name)


ROW = b'{"path": "images/000000.jpg", "text": "[{"}'


@pytest.mark.parametrize(
    "lines",
    [
        b"null\n",
        ROW + b"\n  null\n",
        b"\xef\xbb\xbfnull\n" + ROW,
        ROW + b"\rnull   \n" + ROW,
        b'{"path": "a.jpg", "text":\n' + b"[\n" * 2000 + b"]\n" * 2000 + b"}\n",
        b"[1]\n",
    ],
)
def test_lines_without_an_object_are_refused(tmp_path, lines):
    (tmp_path / "a.jsonl").write_bytes(lines)
    with pytest.raises(ValueError, match=r"^expected an object in every line of .*a\.jsonl, got b'.*'; correct"):
        load(tmp_path / "a.jsonl")


@pytest.mark.parametrize("value", ["[" * 2500 + "]" * 2500, '{"a":' * 64 + "1" + "}" * 64])
@pytest.mark.parametrize("column", ["text", "other"])
def test_deep_values_are_refused(tmp_path, value, column):
    (tmp_path / "a.jsonl").write_text(f'{{"path": "a.jpg", "{column}": {value}}}')
    with pytest.raises(ValueError, match=r"^expected at most 64 nested values in .*a\.jsonl, got more"):
        load(tmp_path / "a.jsonl")


@pytest.mark.parametrize("value", ["[" * 63 + "]" * 63, json.dumps("[{" * 1000 + '\\"['), [[1]] * 1000])
@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
def test_lines_with_many_brackets(folder, value, line_break):
    line = ROW[:-1].decode() + f', "other": {value}}}'
    (folder / "a.jsonl").write_bytes(f"\ufeff{line}{line_break}{line}".encode())
    assert captions(load(folder / "a.jsonl")) == ["[{"] * 2


@pytest.mark.parametrize("images", [False, True])
def test_parquet_of_far_more_rows_than_bytes_is_refused(tmp_path, monkeypatch, images):
    monkeypatch.setattr(columns, "_DECODED", 2**10)
    image, text = captioned.jpeg(0) * 10, "x" * 1000
    table = pa.table({"image": [image if images else "a.jpg"] * 1000, "text": ["a" if images else text] * 1000})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert table.nbytes > 100 * (tmp_path / "a.parquet").stat().st_size + 2**10
    with pytest.raises(ValueError, match=r"expected at most .* bytes in the columns .*image.* of .*a\.parquet"):
        load(tmp_path / "a.parquet")[0]


def test_parquet_that_does_not_fit_into_memory_is_refused(folder, monkeypatch):
    def out_of_memory(*args):
        raise pa.ArrowMemoryError("malloc of size 2147483648 failed")

    as_parquet(folder / "a.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", out_of_memory)
    with pytest.raises(ValueError, match=r"^expected at most .* of .*a\.parquet$"):
        load(folder / "a.parquet")


def test_images_whose_names_start_with_a_tilde(tmp_path):
    (tmp_path / "~a.jpg").write_bytes(captioned.jpeg(0))
    captioned.write_csv(tmp_path / "a.csv", [("~a.jpg", "a")])
    assert load(tmp_path / "a.csv")[0]["image"] == captioned.jpeg(0)


IMAGES = [captioned.jpeg(i) for i in range(4)]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
BYTES_AND_PATH = [{"bytes": image, "path": "x.jpg"} for image in IMAGES]
TYPES = {
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), list("abca")),
    "large": (pa.large_string(), list("abca")),
    "view": (pa.string_view(), list("abca")),
    "bytes": (pa.binary_view(), [b"a", b"b", b"c", b"a"]),
    "list": (pa.list_(pa.string()), [["a", "x"], ["b"], ["c"], ["a"]]),
    "large list": (pa.large_list(pa.large_string()), [["a"], ["b", None], ["c"], ["", "a"]]),
    "fixed-size list": (pa.list_(pa.string(), 2), [["a", "x"], ["b", None], ["c", "x"], ["a", ""]]),
    "list of dictionary": (pa.list_(pa.dictionary(pa.int8(), pa.string())), [["a"], ["b"], ["c"], ["a"]]),
}


def write_parquet(path, images, texts, column="image", **options):
    parquet.write_table(pa.table({column: images, "text": texts}), path, **options)
    return str(path)


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_parquet_captions(folder, kind):
    arrow, values = TYPES[kind]
    source = load(write_parquet(folder / "a.parquet", [p for p, _ in ROWS], pa.array(values, arrow)))
    assert captions(source) == list("abca")


@pytest.mark.parametrize(
    "images",
    [
        pa.array(IMAGES, pa.large_binary()),
        pa.array(IMAGES, pa.binary_view()),
        pa.array(IMAGES).dictionary_encode(),
        pa.array([{"bytes": image} for image in IMAGES]),
        pa.array(BYTES_AND_PATH, pa.struct([("path", pa.large_string()), ("bytes", pa.large_binary())])),
    ],
)
def test_types_of_parquet_images(tmp_path, images):
    source = load(write_parquet(tmp_path / "a.parquet", images, list("abcd")))
    assert [source[i]["image"] for i in range(4)] == IMAGES


@pytest.mark.parametrize("missing", [None, b""])
@pytest.mark.parametrize("struct", [True, False])
@pytest.mark.parametrize("size", [1, 1000])  # statistics have the bounds of small values alone
def test_rows_without_embedded_image_are_dropped(tmp_path, missing, struct, size):
    images = [image * size for image in IMAGES]
    images[1] = missing
    column = [{"bytes": image, "path": None} if struct else image for image in images] + [None] * 2
    source = load(write_parquet(tmp_path / "a.parquet", column, list("abcdef"), row_group_size=2))
    assert source.dropped == {"no image": 3} and captions(source) == list("acd")
    assert [source[i]["image"] for i in range(3)] == [images[0], *images[2:]]


@pytest.mark.parametrize("struct", [True, False])
def test_row_groups_with_known_images_are_not_read(tmp_path, monkeypatch, struct):
    """Nor is any row group by another process, which gets the rows."""
    column = BYTES_AND_PATH if struct else IMAGES
    path = write_parquet(tmp_path / "a.parquet", [*column, None, None, None, column[0]], ["a"] * 8, row_group_size=2)
    read, batches = [], parquet.ParquetFile.iter_batches

    def recorded(file, size, groups, columns):
        read.extend(groups if groups and columns != ["text"] else [])
        return batches(file, size, groups, columns)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", recorded)
    source = load(path)
    assert (len(source), read) == (5, [3])
    assert pickle.loads(pickle.dumps(source)).dropped == {"no image": 3} and read == [3]


def test_images_beside_urls_and_paths_are_read(tmp_path):
    names = ["path", "jpeg", "png", "webp", "image_bytes"]
    for name in names[1:]:
        table = {"url": ["https://x/a.jpg"] * 4, "path": ["gone.jpg"] * 4, name: IMAGES, "caption": list("abcd")}
        parquet.write_table(pa.table(table), tmp_path / "a.parquet")
        assert load(tmp_path / "a.parquet")[3]["image"] == IMAGES[3]


PATHS = [path for path, _ in ROWS][:4]
FALLBACKS = {  # the column that is read
    "null images": ({"image": [IMAGES[0], None, None, None], "image_path": PATHS}, "image_path"),
    "no images": ({"jpg": pa.array([None] * 4, pa.binary()), "image": PATHS}, "image"),
    "null structs": ({"image": pa.array([None] * 4, STRUCT), "path": PATHS}, "path"),
    "other bytes": ({"bytes": [b"ab"] * 4, "file": [b"abcd"] * 4, "image": PATHS}, "image"),
    "no paths": ({"image": pa.array([None] * 4, pa.string()), "jpg": IMAGES}, "jpg"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_image_column_with_images_is_chosen(folder, case):
    columns, chosen = FALLBACKS[case]
    parquet.write_table(pa.table(columns | {"caption": list("abcd")}), folder / "a.parquet")
    source = load(folder / "a.parquet")
    assert (captions(source), source.dropped) == (list("abcd"), {})
    assert source._tables[0].image_column == chosen


def test_captions_of_nan_alone_are_dropped(folder):
    for nan in (float("nan"), [float("nan")]):
        parquet.write_table(pa.table({"image": PATHS, "a": [nan] * 4, "b": list("abcd")}), folder / "a.parquet")
        assert captions(load(f"{folder}/a.parquet?caption=a,b")) == list("abcd")
        with pytest.raises(ValueError, match=r"no row with an image and a caption; .* images are those of 'image'"):
            load(f"{folder}/a.parquet?caption=a")


@pytest.mark.parametrize("bad", [None, "", " \t", "\u3000", "[]", "['', ' ']", b" ", [], [None, " "], float("nan")])
def test_blank_captions_are_dropped(tmp_path, bad):
    if not isinstance(bad, float):
        whole = [b"a", b"b"] if isinstance(bad, bytes) else [["a"], ["b"]] if isinstance(bad, list) else ["a", "b"]
        path = write_parquet(tmp_path / "a.parquet", IMAGES[:3], [whole[0], bad, whole[1]])
        assert (captions(load(path)), load(path).dropped) == (["a", "b"], {"no caption": 1})
    if not isinstance(bad, bytes):
        (tmp_path / "0.jpg").write_bytes(IMAGES[0])
        lines = [json.dumps({"image": "0.jpg", "text": text}) for text in ("a", bad, "b")]
        (tmp_path / "a.jsonl").write_text(
            "\n".join(lines).replace('"a"', '["a"]').replace('"b"', '["b"]')
            if isinstance(bad, list)
            else "\n".join(lines)
        )
        assert load(tmp_path / "a.jsonl").dropped == {"no caption": 1}


def test_paths_of_structs_stay_in_bounds(folder):
    column = [{"bytes": None, "path": "images/000000.jpg"}, {"bytes": b"", "path": "gs://b/a.jpg"}, {"path": "/a.jpg"}]
    path = write_parquet(folder / "a.parquet", pa.array(column, STRUCT), list("abc"))
    source = load(path)
    assert source[0]["image"] == IMAGES[0] and source.key(0) == "images/000000.jpg"
    with pytest.raises(BadRecordError, match="file system"):
        source[1]
    with pytest.raises(ValueError, match=r"2 of 3 paths outside the folder"):
        load(f"{path}?outside=false")


@pytest.mark.parametrize(
    ("images", "texts", "match"),
    [
        ([1, 2], ["a", "b"], "a.parquet, image column 'image': expected paths, encoded images .*, got int64"),
        ([{"x": b"a"}], ["a"], "a.parquet, image column 'image': expected .*, got struct"),
        ([["a"]], ["a"], "a.parquet, image column 'image': expected .*, got list"),
        (IMAGES[:1], [1], "caption column 'text': expected texts or lists of texts, got int64; name another"),
        (IMAGES[:1], [[["a"]]], "a.parquet, caption column 'text': expected texts or lists of texts, got list"),
        (IMAGES[:1], [{"raw": "a"}], "a.parquet, caption column 'text': expected texts or .*, got struct"),
        ([None, None], ["a", "b"], "a.parquet has no row with an image and a caption"),
    ],
)
def test_wrong_types_name_file_and_column(tmp_path, images, texts, match):
    with pytest.raises(ValueError, match=match) as error:
        load(write_parquet(tmp_path / "a.parquet", images, texts))
    assert "\n" not in str(error.value)


def test_embedded_images_alone(tmp_path):
    parquet.write_table(pa.table({"image": [*IMAGES, None]}), tmp_path / "a.parquet")
    source = load(f"{tmp_path}/a.parquet?caption=none")
    assert (len(source), source[3]["image"], source.dropped) == (4, IMAGES[3], {"no image": 1})
