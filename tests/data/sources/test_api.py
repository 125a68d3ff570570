import pickle

import captioned
import pyarrow as pa
import pytest
from captioned import captions
from pyarrow import parquet

from infcl_jax.data import classes, load_source
from infcl_jax.data.sources import files, is_captioned, record_key


def numbers(source):
    return [int(caption.removeprefix("caption ")) for caption in captions(source)]


def tar(path, count=10, start=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    return captioned.write_tar(path, captioned.members(captioned.samples(count, start)))


def test_the_same_samples_from_every_kind_of_source(tmp_path):
    samples = captioned.samples(10)
    folder = captioned.write_folder(tmp_path / "folder", samples)
    captioned.write_csv(
        tmp_path / "table.csv", [(f"folder/{key}.jpg", contents["txt"].decode()) for key, contents in samples]
    )
    captioned.write_tar(tmp_path / "shard-0.tar", captioned.members(samples[:6]))
    captioned.write_tar(tmp_path / "shard-1.tar", captioned.members(samples[6:]))
    (tmp_path / "mixture.json").write_text('[{"path": "shard-0.tar"}, {"path": "shard-1.tar"}]')
    expected = captioned.read_all(load_source(str(folder), "train"))
    assert [example["image"] for example in expected] == [captioned.jpeg(i) for i in range(10)]
    for name in ("table.csv", "shard-{0..1}.tar", "shard-*.tar", "mixture.json"):
        assert captioned.read_all(load_source(str(tmp_path / name), "train")) == expected


@pytest.mark.parametrize(
    "pattern,names",
    [
        ("a.tar", ["a.tar"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}-{b,a}", ["08-b", "08-a", "09-b", "09-a", "10-b", "10-a", "11-b", "11-a"]),
        ("x{000..2}", ["x000", "x001", "x002"]),
        ("b::a::c{1,2}", ["b", "a", "c1", "c2"]),
    ],
)
def test_braces_and_lists(pattern, names):
    assert files.expand(pattern) == names


@pytest.mark.parametrize("pattern", ["{3..1}", "{x}", "{}"])
def test_wrong_braces(pattern):
    with pytest.raises(ValueError, match=r"braces"):
        files.expand(pattern)


def test_wildcards_are_sorted_and_literal_names_win(tmp_path):
    for name in ("b.tar", "a.tar", "[c].tar", "{d}.tar"):
        (tmp_path / name).touch()
    assert files.expand(f"{tmp_path}/?.tar") == [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]
    assert files.expand(f"{tmp_path}/[c].tar") == [f"{tmp_path}/[c].tar"]
    assert files.expand(f"{tmp_path}/{{d}}.tar") == [f"{tmp_path}/{{d}}.tar"]


@pytest.mark.parametrize(
    "split,expected",
    [
        ("train", range(10)),
        ("all", range(10)),
        ("train[:90%]", range(9)),
        ("train[90%:]", range(9, 10)),
        ("train[3:5]", range(3, 5)),
        ("train[8:100]", range(8, 10)),
        ("train[:]", range(10)),
    ],
)
def test_bounds(tmp_path, split, expected):
    source = load_source(str(tar(tmp_path / "a.tar")), split)
    assert numbers(source) == list(expected)


@pytest.mark.parametrize(
    "layout", ["{split}/0.tar", "{split}-0.tar", "data/{split}-0-of-1.tar", "coco_{split}_0.tar", "{split}/{split}.tar"]
)
@pytest.mark.parametrize("validation", ["validation", "val"])
def test_splits_of_a_folder(tmp_path, layout, validation):
    tar(tmp_path / layout.format(split="train"), 4)
    tar(tmp_path / layout.format(split=validation), 2, start=4)
    assert numbers(load_source(str(tmp_path), "train")) == [0, 1, 2, 3]
    assert numbers(load_source(str(tmp_path), "validation[1:]")) == [5]
    with pytest.raises(ValueError, match=r"has no split 'test'; it has .*train"):
        load_source(str(tmp_path), "test")


@pytest.mark.parametrize("split", ["", "train/"])
@pytest.mark.parametrize("layout", ["tars", "files", "table"])
def test_records_of_img2dataset_are_no_tables(tmp_path, layout, split):
    folder = tmp_path / split
    status = {"key": ["0", "1"], "url": ["http://a/0.jpg"] * 2, "status": ["success"] * 2}
    rows = {"path": ["00000/000000.jpg", "00000/000001.jpg"], "caption": ["of the table"] * 2}
    captioned.write_folder(folder / "00000", captioned.samples(2))
    parquet.write_table(pa.table(rows if layout == "table" else status), folder / "00000.parquet")
    (folder / "00000_stats.json").write_text("{}")
    if layout == "tars":
        tar(folder / "00000.tar", 2)
    source = load_source(str(tmp_path), "train")
    assert captions(source) == (rows["caption"] if layout == "table" else ["caption 0", "caption 1"])


@pytest.mark.parametrize("others", [["00002.parquet"], ["urls.csv"], ["00002.parquet", "urls.csv"]])
@pytest.mark.parametrize("split", ["", "train/"])
def test_errors_of_other_tables_name_the_images_of_img2dataset(tmp_path, split, others):
    folder = tmp_path / split
    records = pa.table({"key": ["0"], "url": ["http://a/0.jpg"], "caption": ["a"], "status": ["success"]})
    for number in (0, 1):
        captioned.write_folder(folder / f"0000{number}", captioned.samples(1))
        parquet.write_table(records, folder / f"0000{number}.parquet")
    for name in others:
        if name.endswith("csv"):
            captioned.write_csv(folder / name, [("http://a/0.jpg", "a")], ("url", "caption"))
        else:
            parquet.write_table(records, folder / name)
    with pytest.raises(ValueError, match=r"; .* has images of img2dataset in the folders 00000, 00001: move tables"):
        load_source(str(tmp_path), "train")
    for name in others:
        (folder / name).unlink()
    assert len(load_source(str(tmp_path), "train")) == 2


def test_a_folder_and_a_file_without_splits(tmp_path):
    folder = tmp_path / "data"
    tar(folder / "0.tar", 2)
    path = tar(folder / "1.tar", 2, start=2)
    assert numbers(load_source(f"{folder}/", "train")) == [0, 1, 2, 3]
    for dataset in (folder, path):
        with pytest.raises(ValueError, match=r"is one split, train, got split 'test'; use train, or bounds such as"):
            load_source(str(dataset), "test")
    assert numbers(load_source(str(tar(tmp_path / "my-test.tar", 1)), "test")) == [0]


def test_relative_paths_and_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tar(tmp_path / "photos" / "0.tar", 3)
    captioned.write_folder(tmp_path / "digits", captioned.samples(2))
    for dataset in ("photos", "./photos", "photos/0.tar", "photos/*.tar"):
        assert len(load_source(dataset, "train")) == 3
    assert len(load_source("./digits", "train")) == 2 and len(load_source("digits", "train")) > 1000


@pytest.mark.parametrize(
    "dataset,split,kind,match",
    [
        (
            "a.tar",
            "train[",
            ValueError,
            r"expected a split such as train, train\[:90%\] or train\[100:200\], got 'train\['",
        ),
        (
            "a.tar",
            "train[10:]",
            ValueError,
            r"expected a split of .*a\.tar with samples, got 'train\[10:\]' of 10 samples",
        ),
        ("a.tar", "train[:0%]", ValueError, "expected a split of .*a.tar with samples"),
        ("a.tar?label=x", "train", ValueError, "expected the options image, caption of tar files, got label"),
        ("a.tar?image=x", "train", ValueError, "has no sample with an image and a caption .*dropped: 10 no image"),
        ("z.tar", "train", FileNotFoundError, r"1 of the 1 shards of .*z\.tar do not exist, the first is .*z\.tar"),
        ("{a,y,z}.tar", "train", FileNotFoundError, r"2 of the 3 shards of .* do not exist, the first is .*y\.tar"),
        ("z*.tar", "train", FileNotFoundError, r"no file matches .*z\*\.tar; check the path and the pattern"),
        ("z.csv", "train", FileNotFoundError, r"z\.csv does not exist; check the path"),
        ("missing", "train", FileNotFoundError, "missing does not exist; check the path, relative to"),
        ("a.txt", "train", ValueError, r"expected a folder or a file with one of the extensions .*\.tar, .*a\.txt"),
        ("a.*", "train", ValueError, r"to be tar files, or tables \(.*\), got a\.tar to a\.txt"),
        ("mixed", "train", ValueError, r"has files of several kinds: a\.csv, b\.tar; name the files, such as \*\.tar"),
        ("empty", "train", ValueError, "has 0 images and none with a caption"),
        ("a.tar?caption=alt", "train", ValueError, r"has no sample with an image and a caption \(alt\)"),
        (
            "garbage.tar",
            "train",
            ValueError,
            r"has no sample .*garbage\.tar: damaged: the checksum of the header at byte 0",
        ),
    ],
)
def test_mistakes(tmp_path, dataset, split, kind, match):
    tar(tmp_path / "a.tar")
    (tmp_path / "a.txt").touch()
    (tmp_path / "garbage.tar").write_bytes(b"garbage" * 1000)
    for folder in ("empty", "mixed"):
        (tmp_path / folder).mkdir()
    for name in ("a.csv", "b.tar"):
        (tmp_path / "mixed" / name).touch()
    with pytest.raises(kind, match=match) as error:
        load_source(f"{tmp_path}/{dataset}", split)
    assert "\n" not in str(error.value)


def test_paths_that_leave_the_folder_are_no_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"\.\./x does not exist"):
        load_source("../x", "train")


@pytest.mark.parametrize("kind", ["folder", "tar", "csv", "parquet"])
def test_images_without_captions_and_the_names_of_records(tmp_path, kind):
    images = [captioned.jpeg(i) for i in range(5)]
    folder = captioned.write_folder(tmp_path / "a", [(f"b/{i}", {"jpg": image}) for i, image in enumerate(images)])
    captioned.write_tar(tmp_path / "a.tar", [(f"b/{i}.jpg", image) for i, image in enumerate(images)])
    captioned.write_csv(tmp_path / "a.csv", [(f"{folder}/b/{i}.jpg",) for i in range(5)], ("path",))
    parquet.write_table(pa.table({"image": images}), tmp_path / "a.parquet")
    path, keys = {
        "folder": (folder, [f"b/{i}.jpg" for i in range(5)]),
        "tar": (tmp_path / "a.tar", [f"b/{i}" for i in range(5)]),
        "csv": (tmp_path / "a.csv", [f"{folder}/b/{i}.jpg" for i in range(5)]),
        "parquet": (tmp_path / "a.parquet", [str(i) for i in range(5)]),
    }[kind]
    source = pickle.loads(pickle.dumps(load_source(f"{path}?caption=none", "train[1:]")))
    assert [source[i] for i in range(4)] == [
        {"image": image, "caption": "", "captions": (), "label": -1} for image in images[1:]
    ]
    assert [record_key(source, i) for i in range(4)] == keys[1:] and not is_captioned(source)
    with pytest.raises(ValueError, match=r"without classes|no class names"):
        classes(source)


def test_records_of_mixtures_have_the_names_of_their_components(tmp_path):
    captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(2)))
    captioned.write_folder(tmp_path / "b", captioned.samples(1))
    (tmp_path / "mixture.json").write_text('[{"path": "a.tar"}, {"path": "b"}]')
    source = load_source(str(tmp_path / "mixture.json"), "train")
    assert [record_key(source, i) for i in range(3)] == ["000000", "000001", "000000.jpg"]
    assert record_key(load_source("digits", "train"), 7) == "7"
