"""Labels, class names and templates of tables, folders and tar files."""

import json
import pickle

import captioned
import pyarrow as pa
import pytest
from captioned import load
from pyarrow import parquet

from infcl_jax.data import BadRecordError, classes
from infcl_jax.data.sources import is_captioned
from infcl_jax.data.sources.labels import PHOTO_TEMPLATES

KINDS = ("tabby_cat", "dog", "tabby_cat", "bird")
NAMES = ("bird", "dog", "tabby cat")
LABELS = [2, 1, 2, 0]


def labels(source):
    return [source[index]["label"] for index in range(len(source))]


@pytest.fixture
def images(tmp_path):
    return captioned.write_folder(tmp_path, [(key, {"jpg": c["jpg"]}) for key, c in captioned.samples(4)])


def write_table(path, values, column="label", captions=None):
    columns = {"path": [f"{i:06d}.jpg" for i in range(len(values))], column: list(values)}
    columns |= {"caption": captions} if captions else {}
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path)
    elif path.suffix == ".jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        captioned.write_csv(path, list(zip(*columns.values(), strict=True)), columns)
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("captions", [None, ["a", "b", "c", "d"]])
def test_names_in_a_table(images, name, captions):
    source = load(write_table(images / name, KINDS, captions=captions))
    assert labels(source) == LABELS and classes(source) == (NAMES, PHOTO_TEMPLATES)
    assert is_captioned(source) == (captions is not None)
    prompts = tuple(template.replace("{}", "dog") for template in PHOTO_TEMPLATES)
    assert source[1]["captions"] == (("b",) if captions else prompts)
    assert source[1]["image"] == captioned.jpeg(1)
    assert pickle.loads(pickle.dumps(source))[1] == source[1]


CLASS_FILES = {
    "classes.txt": "bird\ndog\ntabby cat\n",
    "classes.json": '["bird", "dog", "tabby cat"]',
    "labels by name": '{"dog": 1, "tabby cat": 2, "bird": 0}',
    "names by label": '{"2": "tabby cat", "0": "bird", "1": "dog"}',
    "names by value": '{"n015": "bird", "n021": "dog", "n0212": "tabby cat"}',
}


@pytest.mark.parametrize(
    ("kind", "name"), list(zip(CLASS_FILES, ["a.csv", "a.jsonl", "a.parquet", "a.csv", "a.parquet"], strict=True))
)
def test_class_names_beside_a_table(images, kind, name):
    (images / ("classes.txt" if kind == "classes.txt" else "classes.json")).write_text(CLASS_FILES[kind])
    for convert in (int, float, ["n015", "n021", "n0212"].__getitem__, NAMES.__getitem__):
        source = load(write_table(images / name, [convert(label) for label in LABELS], "class"))
        assert labels(source) == LABELS, convert
        assert classes(source).names == NAMES, convert


def test_underscores_of_folders_are_spaces_of_names(tmp_path):
    class_folder(tmp_path, ("tabby_cat", "sea_lion", "tabby_cat", "sea_lion"))
    (tmp_path / "classes.txt").write_text("tabby cat\nsea lion")
    source = load(tmp_path)
    assert labels(source) == [1, 1, 0, 0] and source[0]["captions"][0] == "a photo of a sea lion"


def test_several_tables_share_their_classes(images):
    write_table(images / "train-0.csv", KINDS[:2])
    write_table(images / "train-1.csv", KINDS[2:])
    source = load(f"{images}/train-*.csv")
    assert labels(source) == LABELS and classes(source).names == NAMES
    bounded = load(f"{images}/train-*.csv", "train[1:3]")
    assert labels(bounded) == LABELS[1:3] and classes(bounded).names == NAMES


def test_captioned_rows_without_label(images):
    (images / "classes.txt").write_text("bird\ndog")
    source = load(write_table(images / "a.parquet", (None, 0, 1, -1), captions=list("abcd")))
    assert labels(source) == [-1, 0, 1, -1]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("missing", [-1, -1.0, float("nan"), None])
def test_labels_of_no_class_are_dropped(images, kind, missing):
    (images / "classes.txt").write_text("zero\none\n")
    write_table(images / f"a.{kind}", [0, missing, 1], "label")
    source = load(images / f"a.{kind}")
    assert labels(source) == [0, 1] and source.dropped == {"no label": 1}


def test_templates(images):
    (images / "templates.txt").write_text("a drawing of {c}.\n{} {1}\n")
    source = load(write_table(images / "a.csv", KINDS))
    assert classes(source).templates == ("a drawing of {}.", "{} {1}")
    assert source[3]["captions"] == ("a drawing of bird.", "bird {1}")
    (images / "templates.txt").write_text("a drawing of {name}.\n")
    with pytest.raises(ValueError, match=r'templates.txt, line 1: expected "{}" or "{c}" for the class name'):
        load(write_table(images / "a.csv", KINDS))


PROMPTS = {"bird": "a {} in flight", "dog": ["barks", "a {c}"], "tabby_cat": ["striped"]}
PROMPTS_OF = (("a bird in flight",), ("barks", "a dog"), ("striped",))


@pytest.mark.parametrize("kind", ["table", "folder", "split", "tars"])
def test_prompts_of_each_class(tmp_path, kind):
    folder = class_folder(tmp_path / "train" if kind == "split" else tmp_path)
    (tmp_path / "templates.json").write_text(json.dumps(PROMPTS), encoding="utf-8-sig")
    if kind == "table":
        folder = write_table(captioned.write_folder(tmp_path, captioned.samples(4)) / "a.csv", KINDS)
    elif kind == "tars":
        (tmp_path / "classes.txt").write_text("\n".join(NAMES))
        samples = [
            (key, {"jpg": c["jpg"], "cls": str(n).encode()})
            for (key, c), n in zip(captioned.samples(4), LABELS, strict=True)
        ]
        folder = captioned.write_tar(tmp_path / "a.tar", captioned.members(samples))
    source = load(folder if kind != "split" else tmp_path)
    assert classes(source) == (NAMES, PROMPTS_OF)
    assert [source[row]["captions"] for row in range(4)] == [PROMPTS_OF[label] for label in labels(source)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"bird": ["a"], "dgo": ["b"]},
            "templates.json: expected prompts of all 3 classes, got none of 'dog', 'tabby cat'; no class .* 'dgo'",
        ),
        ({"bird": []}, "templates.json, class 'bird': expected texts, none of them empty"),
        ({"imagenet1k": {"bird": ["a"]}}, "templates.json, class 'imagenet1k': expected texts"),
        (["a bird"], 'templates.json, text 1: expected "{}" or "{c}" for the class name, got .*; prompts of single'),
        (3, "templates.json: expected texts"),
    ],
)
def test_damaged_prompts_are_named(images, content, message):
    (images / "templates.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load(write_table(images / "a.csv", KINDS))


def class_folder(folder, values=KINDS):
    samples = [
        (f"{value}/{key}", {"jpg": c["jpg"]}) for value, (key, c) in zip(values, captioned.samples(4), strict=True)
    ]
    return captioned.write_folder(folder, samples)


def test_subfolders_are_classes(tmp_path):
    source = load(class_folder(tmp_path))
    assert labels(source) == sorted(LABELS) and classes(source) == (NAMES, PHOTO_TEMPLATES)
    assert not is_captioned(source) and source[1]["captions"][0] == "a photo of a dog"
    (tmp_path / "alone.jpg").write_bytes(captioned.jpeg(9))
    assert load(tmp_path).dropped == {"no class": 1}
    (tmp_path / "dog" / "000001.txt").write_text("a caption")
    source = load(tmp_path)
    assert source[0] == {"image": captioned.jpeg(1), "caption": "a caption", "captions": ("a caption",), "label": 0}
    assert classes(source).names == ("dog",) and source.dropped == {"no caption": 4}


def test_class_names_above_the_folder_of_a_split(tmp_path):
    values = [{"tabby_cat": "n0212", "dog": "n021", "bird": "n015"}[value] for value in KINDS]
    for split in ("train", "val"):
        class_folder(tmp_path / split, values)
    (tmp_path / "classes.json").write_text(CLASS_FILES["names by value"])
    source = load(tmp_path, "validation")
    assert labels(source) == sorted(LABELS) and classes(source).names == NAMES


def write_shard(folder, contents, name="a.tar"):
    samples = [(f"{i:06d}", {"jpg": captioned.jpeg(i), **members}) for i, members in enumerate(contents)]
    return captioned.write_tar(folder / name, captioned.members(samples))


TAR_MEMBERS = {
    "cls": lambda label: {"cls": str(label).encode()},
    "name in cls": lambda label: {"cls": NAMES[label].encode() + b"\n"},
    "json": lambda label: {"json": json.dumps({"label": label}).encode()},
    "cls with json of other data": lambda label: {"json": b'{"width": 10}', "cls": str(label).encode()},
}


@pytest.mark.parametrize("kind", TAR_MEMBERS)
@pytest.mark.parametrize("captions", [True, False])
def test_labels_in_tars(tmp_path, kind, captions):
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    contents = [TAR_MEMBERS[kind](label) | ({"txt": b"a caption"} if captions else {}) for label in LABELS]
    write_shard(tmp_path, contents[:1], "0.tar")
    write_shard(tmp_path, contents[1:], "1.tar")
    source = load(f"{tmp_path}/{{0,1}}.tar")
    assert labels(source) == LABELS and classes(source) == (NAMES, PHOTO_TEMPLATES)
    assert is_captioned(source) == captions
    assert source[1]["captions"][0] == ("a caption" if captions else "a photo of a dog")
    assert source[2]["image"] == captioned.jpeg(1)
    assert pickle.loads(pickle.dumps(source))[3] == source[3]


def test_samples_without_label_are_dropped_where_there_are_no_captions(tmp_path):
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    source = load(write_shard(tmp_path, [{"cls": b"2"}, {}, {"cls": b"1"}]))
    assert labels(source) == [2, 1] and source.dropped == {"no label": 1}


def test_captions_and_labels_in_one_json_and_samples_without_label(tmp_path):
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    contents = [{"json": json.dumps({"captions": ["a", "b"], "label": 2}).encode()}, {"txt": b"c"}]
    contents += [{"json": b'{"text": "d"}'}, {"txt": b"e", "cls": b"0"}]
    source = load(write_shard(tmp_path, contents))
    assert labels(source) == [2, -1, -1, 0]
    assert [source[i]["captions"] for i in range(4)] == [("a", "b"), ("c",), ("d",), ("e",)]


def test_tars_without_class_names_are_scanned_once(tmp_path):
    path = write_shard(tmp_path, [{"txt": b"a", "cls": b"0"}])
    source = load(path)
    assert labels(source) == [-1] and len(list(tmp_path.glob(".tar_index_*"))) == 1
    with pytest.raises(
        ValueError, match=r"a\.tar has no class names; put a classes\.txt with one name per line beside"
    ):
        classes(source)
    (tmp_path / "classes.txt").write_text("cat")
    assert labels(load(path)) == [0]


def test_a_wrong_label_in_a_tar_names_the_sample(tmp_path):
    (tmp_path / "classes.txt").write_text("cat\ndog")
    source = load(write_shard(tmp_path, [{"cls": b"1"}, {"cls": b"2"}, {"cls": b"bird"}]))
    assert source[0]["label"] == 1
    for index, value in ((1, "2"), (2, "bird")):
        with pytest.raises(
            BadRecordError,
            match=rf"bad record {index} .*\(a\.tar, key 00000{index}\): .*expected a label in \[0, 2\) or a class of"
            rf" .*classes\.txt, got '{value}'; correct one of them$",
        ):
            source[index]


def test_classes_of_a_mixture(tmp_path):
    for name in ("a", "b"):
        class_folder(tmp_path / name)
    class_folder(tmp_path / "c", ("cow",) * 4)
    for names in ("ab", "ac"):
        (tmp_path / f"{names}.json").write_text(json.dumps([{"path": name} for name in names]))
    source = load(tmp_path / "ab.json")
    assert labels(source) == 2 * sorted(LABELS) and classes(source).names == NAMES and not is_captioned(source)
    with pytest.raises(ValueError, match=r"expected components of .*ac\.json with the same classes"):
        classes(load(tmp_path / "ac.json"))


@pytest.mark.parametrize(
    ("values", "files", "match"),
    [
        (
            [0, 1, 0, 2],
            {},
            r"a\.csv, column 'label' has the labels 0, 1, 2 without class names; put a classes\.txt with",
        ),
        ([0, 1, 2, 3], {}, r"has the labels 0, 1, 2, \.\.\. without class names"),
        (
            [0, 1, 0, 2],
            {"classes.txt": "a\nb"},
            r"column 'label': expected a label in \[0, 2\) or .*classes\.txt, got '2'",
        ),
        (["a", "b", "a", "c"], {"classes.txt": "a\nb"}, r"expected a label in .*, got 'c'; correct one of them"),
        ([0, 1, 0, -2], {"classes.txt": "a\nb"}, "got '-2'"),
        (KINDS, {"classes.txt": "a\n\nb"}, r"classes\.txt, line 2: expected a text, got an empty line"),
        (KINDS, {"classes.txt": b"caf\xe9"}, r"classes\.txt is not UTF-8: byte 3"),
        (KINDS, {"classes.txt": ""}, r"classes\.txt, line 1: expected a text, got an empty line"),
        (KINDS, {"classes.json": "{"}, r"expected JSON in .*classes\.json, got Expecting property name"),
        (KINDS, {"classes.json": "[]"}, r"classes\.json: expected a list of class names, or an object .* got \[\]"),
        (KINDS, {"classes.json": '{"0": ["n1", "cat"]}'}, r"classes\.json: expected a list of class names"),
        (KINDS, {"classes.json": "3"}, r"classes\.json: expected a list of class names, .* got 3"),
        (
            KINDS,
            {"templates.txt": "a photo"},
            r"templates\.txt, line 1: expected \"\{\}\" or \"\{c\}\" for the class name, got 'a photo'",
        ),
        (["", "", "", ""], {}, r"has no row with an image and a label; check the columns path, label"),
    ],
)
def test_mistakes_of_tables(images, values, files, match):
    for name, content in files.items():
        (images / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=match) as error:
        load(write_table(images / "a.csv", values))
    assert "\n" not in str(error.value)
    if any(values):  # training on captions does not need labels
        source = load(write_table(images / "a.csv", values, captions=list("abcd")))
        assert source[0]["caption"] == "a" and labels(source) == [-1] * 4
        with pytest.raises(ValueError, match=match):
            classes(source)


def test_missing_label_columns_and_folders_say_what_to_add(images):
    captioned.write_csv(images / "a.csv", [("000000.jpg", "a", "x")], ("path", "caption", "kind"))
    with pytest.raises(
        ValueError, match=r"a\.csv has no label column; its columns are path, caption, kind: name one with"
    ):
        classes(load(images / "a.csv"))
    assert classes(load(f"{images}/a.csv?label=kind")).names == ("x",)
    with pytest.raises(ValueError, match=r"a\.csv has no label column 'sort'; its columns are"):
        load(f"{images}/a.csv?label=sort")
    with pytest.raises(ValueError, match=r"none with a caption; put .* or the images of each class into a subfolder"):
        (images / "a.csv").unlink()
        load(images)


def test_other_values_than_texts_and_numbers_are_no_labels(images):
    with pytest.raises(ValueError, match=r"a\.parquet, column 'label': expected class names or integers in UTF-8, got"):
        load(write_table(images / "a.parquet", [{"a": 1}] * 4))
