import json
import pickle
import re

import captioned
import pytest
from captioned import captions

from infcl_jax.data import BadRecordError, load_source
from infcl_jax.data.sources import files


def test_captions_beside_images(tmp_path, caplog):
    samples = [(f"{'ba'[i % 2]}/{key}", contents) for i, (key, contents) in enumerate(captioned.samples(4))]
    del samples[2][1]["txt"]
    captioned.write_folder(tmp_path, samples)
    (tmp_path / "c.JPEG").write_bytes(captioned.jpeg(9))
    (tmp_path / "c.txt").write_text("c\n")
    (tmp_path / "notes.md").write_text("no image")
    source = load_source(str(tmp_path), "train")
    assert captions(source) == ["caption 1", "caption 3", "caption 0", "c"]
    assert source[3]["image"] == captioned.jpeg(9)
    assert source.dropped == {"no caption": 1} and "4 samples, dropped: 1 no caption" in caplog.text
    assert pickle.loads(pickle.dumps(source))[1] == source[1]


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_metadata_in_the_layout_of_image_folder(tmp_path, name):
    for split in ("train", "test"):
        folder = tmp_path / split
        captioned.write_folder(folder, [(key, {"jpg": contents["jpg"]}) for key, contents in captioned.samples(3)])
        rows = [(f"{i:06d}.jpg", f"{split} {i}") for i in (2, 0, 1)]
        if name.endswith("csv"):
            captioned.write_csv(folder / name, rows, ("file_name", "text"))
        else:
            lines = [json.dumps({"file_name": path, "text": caption}) for path, caption in rows]
            (folder / name).write_text("\n".join(lines))
    source = load_source(str(tmp_path), "test")
    assert captions(source) == ["test 2", "test 0", "test 1"]
    assert source[0]["image"] == captioned.jpeg(2)


def test_damaged_samples_name_the_path(tmp_path):
    captioned.write_folder(tmp_path, captioned.samples(2))
    source = load_source(str(tmp_path), "train")
    (tmp_path / "000001.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BadRecordError, match=r"bad record 1 of .*, split train \(000001\.jpg\): .*not UTF-8: byte 3"):
        source[1]
    (tmp_path / "000000.jpg").unlink()
    with pytest.raises(BadRecordError, match=r"bad record 0 of .*, split train \(000000\.jpg\): FileNotFoundError"):
        source[0]


@pytest.mark.parametrize("extension", ["TXT", "Txt"])
def test_captions_with_extensions_in_capitals(tmp_path, extension):
    captioned.write_folder(tmp_path, [("0", {"JPG": captioned.jpeg(0), extension: b"a"})])
    captioned.write_folder(tmp_path, [("a.v1", {"jpg": captioned.jpeg(1), extension: b"b", "txt": b"c"})])
    assert captions(load_source(str(tmp_path), "train")) == ["a", "c"]


def test_hidden_and_system_files_are_left_out(tmp_path):
    for folder in (
        ".",
        ".ipynb_checkpoints",
        "cat/@eaDir",
        "__MACOSX",
        ".Trash-0",
        "$RECYCLE.BIN",
        "cat",
        "dog/.thumbnails",
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name in ("._0.jpg", "0.jpg") if folder != "." else (".0.jpg",):
            (tmp_path / folder / name).write_bytes(captioned.jpeg(0))
    (tmp_path / "dog" / "1.jpg").write_bytes(captioned.jpeg(1))
    (tmp_path / "dog" / "._1.txt").write_text("AppleDouble")
    source = load_source(str(tmp_path), "train")
    assert [source.key(i) for i in range(len(source))] == ["cat/0.jpg", "dog/1.jpg"]
    assert source.classes().names == ("cat", "dog") and source.dropped == {}


def keys(dataset):
    source = load_source(str(dataset), "train")
    return [source.key(i) for i in range(len(source))]


@pytest.fixture
def store(tmp_path):
    """Two class folders, outside of the folder of the tests."""
    names = ["robin/0", "robin/deep/1", "wren/0"]
    return captioned.write_folder(tmp_path / "store", [(name, {"jpg": captioned.jpeg(0)}) for name in names])


def test_links_to_class_folders_are_followed(tmp_path, store, caplog):
    subset = tmp_path / "subset"
    subset.mkdir()
    for name in ("robin", "wren"):
        (subset / name).symlink_to(f"../store/{name}")
    source = load_source(str(subset), "train")
    assert keys(subset) == ["robin/0.jpg", "robin/deep/1.jpg", "wren/0.jpg"]
    assert source.classes().names == ("robin", "wren") and source[0]["label"] == 0
    assert f"2 links to folders outside {subset}, the first is 'robin'; ?outside=false leaves them out" in caplog.text
    caplog.clear()
    assert len(keys(f"{subset}?outside=true")) == 3 and caplog.messages == []
    (subset / "owl").mkdir()
    (subset / "owl" / "0.jpg").write_bytes(captioned.jpeg(0))
    source = load_source(f"{subset}?outside=false", "train")
    assert source.key(0) == "owl/0.jpg" and source.dropped == {"link outside": 2}
    for name in ("robin", "wren", "owl/0.jpg", "owl"):
        path = subset / name
        path.rmdir() if name == "owl" else path.unlink()
    (subset / "train").symlink_to("../store")
    assert keys(subset) == ["robin/0.jpg", "robin/deep/1.jpg", "wren/0.jpg"]  # a split


def test_loops_of_links_end(tmp_path, store):
    links = {"self": ".", "up": "..", "robin/up": "..", "robin/deep/again": "../../robin", "wren/deep/up": "../../.."}
    links |= {"robin/other": "../wren", "wren/other": "../robin", "above": "/", "broken": "no", "itself": "itself"}
    (store / "wren" / "deep").mkdir()
    for name, target in links.items():
        (store / name).symlink_to(target)
    expected = ["robin/0.jpg", "robin/deep/1.jpg", "robin/other/0.jpg", "wren/0.jpg"]
    assert keys(store) == [*expected, "wren/other/0.jpg", "wren/other/deep/1.jpg"]


@pytest.mark.parametrize("options", ["", "?caption=none"])
def test_a_folder_with_several_links_counts_once(tmp_path, options):
    contents = {"jpg": captioned.jpeg(0), "txt": b"a"}
    captioned.write_folder(
        tmp_path / "v1", [("0", contents), ("deep/1", contents), ("deep/2", contents | {"txt": b""})]
    )
    (tmp_path / "latest").symlink_to("v1")
    (tmp_path / "again").symlink_to("v1/deep")
    source = load_source(f"{tmp_path}{options}", "train")
    expected = ["v1/0.jpg", "v1/deep/1.jpg"] + ["v1/deep/2.jpg"] * bool(options)
    assert [source.key(i) for i in range(len(source))] == expected
    assert source.dropped == {"linked again": 5} | ({} if options else {"no caption": 1})


@pytest.mark.parametrize("blank", [b" \n", b"\xef\xbb\xbf\r\n", b"a", b"a caption"])
def test_only_captions_that_may_be_blank_are_read(tmp_path, monkeypatch, blank):
    captioned.write_folder(tmp_path, [*captioned.samples(2), ("x", {"jpg": captioned.jpeg(9), "txt": blank})])
    (tmp_path / "empty.jpg").write_bytes(captioned.jpeg(9))
    (tmp_path / "empty.txt").touch()
    read, paths = files.read_file, []
    monkeypatch.setattr(files, "read_file", lambda path, limit: paths.append(path) or read(path, limit))
    source = load_source(str(tmp_path), "train")
    assert len(source) == 2 + (b"a" in blank) and source.dropped == {"no caption": 2 - (b"a" in blank)}
    assert paths == [str(tmp_path / "x.txt")] * (len(blank) < 6)


@pytest.mark.parametrize("folder", ["Images/", "Images/all/", ""])
@pytest.mark.parametrize(
    "text", ["image,caption\n0.jpg,a dog\n", "0.jpg#0\ta dog\n", '"image"| "caption"\n"0.jpg"| "a"\n']
)
def test_a_table_in_a_text_file_is_no_class_folder(tmp_path, folder, text):
    captioned.write_folder(tmp_path, [(f"{folder}0", {"jpg": captioned.jpeg(0)})])
    (tmp_path / "captions.txt").write_text(text)
    extension = "tsv" if "\t" in text else "csv"
    images = (tmp_path / folder).as_posix()
    match = rf"got {tmp_path}/captions\.txt, a table .* open {tmp_path}/captions\.{extension}\?folder={images}$"
    with pytest.raises(ValueError, match=match):
        load_source(str(tmp_path), "train")
    captioned.write_folder(tmp_path / "other", [("0", {"jpg": captioned.jpeg(0)})])
    assert load_source(str(tmp_path), "train").classes().names[-1] == "other"  # several classes


@pytest.mark.parametrize("text", ["Photos of dogs, cats; see 0.jpg.", "0.jpg\n", "1.jpg,a\n", "\xff", ""])
def test_other_text_files_do_not_matter_to_a_class_folder(tmp_path, text):
    captioned.write_folder(tmp_path, [("dog/0", {"jpg": captioned.jpeg(0)})])
    (tmp_path / "README.txt").write_text(text, encoding="latin-1")
    assert load_source(str(tmp_path), "train").classes().names == ("dog",)


def test_the_hint_of_a_folder_without_captions_opens_it(tmp_path, store):
    (tmp_path / "subset").mkdir()
    (tmp_path / "subset" / "0.jpg").write_bytes(captioned.jpeg(0))
    (tmp_path / "subset" / "robin").symlink_to(store / "robin")
    dataset = f"{tmp_path}/subset?outside=false"
    with pytest.raises(
        ValueError, match=r"has 1 images and none with a caption \(1 links outside are left out\)"
    ) as error:
        load_source(dataset, "train")
    assert keys(re.search(r"subfolder; (.*) reads images alone", str(error.value))[1]) == ["0.jpg"]


@pytest.mark.parametrize("images", [0, 2])
def test_folder_without_captions(tmp_path, images):
    for number in range(images):
        (tmp_path / f"{number}.jpg").write_bytes(captioned.jpeg(number))
    with pytest.raises(ValueError, match=rf"has {images} images and none with a caption; put KEY\.txt beside KEY\.jpg"):
        load_source(str(tmp_path), "train")
    with pytest.raises(ValueError, match=r"expected no options for the folder"):
        load_source(f"{tmp_path}?image=path", "train")
