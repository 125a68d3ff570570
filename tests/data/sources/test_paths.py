import json

import captioned
import pyarrow as pa
import pytest

from infcl_jax.data import BadRecordError, load_source
from infcl_jax.data.sources import paths
from infcl_jax.evaluation.benchmark_source import load_benchmark

IMAGE = captioned.jpeg(0)


@pytest.fixture
def folder(tmp_path):
    """Folder "set" with an image, a link to it from outside, and links to an image outside."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jpg").write_bytes(IMAGE)
    (tmp_path / "b.jpg").write_bytes(IMAGE)
    (tmp_path / "set" / "link.jpg").symlink_to(tmp_path / "b.jpg")
    (tmp_path / "set" / "up").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path / "set")
    return tmp_path / "set"


@pytest.mark.parametrize(
    "path,base,outside,target",
    [
        ("a.jpg", "/data", None, "/data/a.jpg"),
        ("a.jpg", "", None, "a.jpg"),
        ("../a.jpg", "/data", None, "/data/../a.jpg"),
        ("~/a.jpg", "/data", None, "/data/~/a.jpg"),
        ("/else/a.jpg", "/data", None, "/else/a.jpg"),
        ("a.jpg", "gs://bucket/data", None, "gs://bucket/data/a.jpg"),
        ("gs://other/a.jpg", "gs://bucket/data", None, "gs://other/a.jpg"),
        ("https://x.org/a.jpg", "https://x.org/data", None, "https://x.org/a.jpg"),
        ("gs://bucket/a.jpg", "/data", True, "gs://bucket/a.jpg"),
        ("gs://bucket/data/a.jpg", "gs://bucket/data", False, "gs://bucket/data/a.jpg"),
    ],
)
def test_paths_on_the_file_system_of_the_folder(path, base, outside, target):
    assert paths.resolve(path, base, outside) == target


@pytest.mark.parametrize(
    "path,base,outside",
    [
        ("", "/data", True),
        ("x" * 5000, "/data", True),
        ("a\0.jpg", "/data", True),
        ("simplecache::gs://bucket/a.jpg", "gs://bucket", True),
        ("file:///data/a.jpg", "/data", None),
        ("x/file:///a.jpg", "/data", None),
        ("gs://bucket/a.jpg", "", None),
        ("/etc/a.jpg", "gs://bucket", None),
        ("file:///etc/a.jpg", "gs://bucket", None),
        ("https://10.0.0.1/a.jpg", "https://x.org/data", None),
        ("gs://other/a.jpg", "gs://bucket/data", False),
        ("../a.jpg", "gs://bucket/data", False),
        ("/etc/a.jpg", "/data", False),
        ("../data2/a.jpg", "/data", False),
    ],
)
def test_paths_out_of_bounds(path, base, outside):
    with pytest.raises(ValueError, match=r"^expected a path "):
        paths.resolve(path, base, outside)


def test_links_are_inside_where_their_files_are(folder):
    for path in ("link.jpg", "up/b.jpg", "../b.jpg"):
        assert paths.resolve(path, str(folder)) == f"{folder}/{path}"
        with pytest.raises(ValueError, match=f"expected a path inside the folder {folder}, got"):
            paths.resolve(path, str(folder), False)
    for path in ("a.jpg", "up/set/a.jpg", f"{folder}/../other/a.jpg"):
        paths.resolve(path, str(folder), False)


@pytest.mark.parametrize(
    ("kind", "base"),
    [(pa.string(), "real"), (pa.binary(), "link"), (pa.large_string(), "relative"), (pa.binary(), "remote")],
)
def test_paths_outside_of_a_folder(folder, kind, base, monkeypatch):
    monkeypatch.chdir(folder)
    inside = ["a.jpg", "x/a..jpg", "x/../a.jpg", "../set/a.jpg", f"{folder}/a.jpg"]
    outside = ["../b.jpg", "/etc/a.jpg", "x/../../b.jpg", f"{folder}2/a.jpg", f"{folder}/../b.jpg", "file:///a.jpg"]
    name = {"real": f"{folder}", "link": f"{folder.parent}/other", "relative": "", "remote": "gs://bucket/set"}[base]
    if base == "remote":
        inside = [*inside[:-1], "gs://bucket/set/a.jpg"]
        outside += [f"{folder}/a.jpg", "gs://bucket/a.jpg", "gs://bucket/set/../a.jpg"]
    if base == "link":  # the name of the folder counts, and the folder that it links to
        inside = [*inside[:3], "../other/a.jpg", *inside[-1:]]
    column = pa.chunked_array([pa.array(inside, kind), pa.array([], kind), pa.array(outside * 2, kind)])
    assert paths.are_outside(column, name).tolist() == [False] * len(inside) + [True] * 2 * len(outside)


def write(folder, rows, name="a.csv"):
    if name == "dataset_coco.json":
        rows = [{"filename": path, "split": "test", "sentences": [{"raw": text}]} for path, text in rows]
        (folder / name).write_text(json.dumps({"images": rows}))
        return f"{folder}/{name}"
    return str(captioned.write_csv(folder / name, rows))


def load(dataset):
    return load_benchmark(dataset, "test", "nowhere") if "coco" in dataset else load_source(dataset, "train")


@pytest.mark.parametrize("name", ["a.csv", "dataset_coco.json"])
def test_rows_outside_are_counted_or_refused(folder, caplog, name):
    dataset = write(folder, [("a.jpg", "a"), ("../b.jpg", "b"), (str(folder.parent / "b.jpg"), "c")], name)
    assert [load(dataset)[i]["image"] for i in range(3)] == [IMAGE] * 3
    message = f"has 2 of 3 paths outside the folder {folder}, the first is '../b.jpg'; "
    assert [message in text for text in caplog.messages] == [True] * 3
    with pytest.raises(ValueError, match=message + "outside=false refuses them"):
        load(f"{dataset}?outside=false")
    caplog.clear()
    load(f"{dataset}?outside=true")
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["a.csv", "dataset_coco.json"])
def test_every_row_stays_on_its_file_system(folder, name):
    dataset = write(folder, [("a.jpg", "a")] * 20 + [(f"file://{folder}/a.jpg", "b")], name)
    with pytest.raises(BadRecordError, match=r"bad record 20 .*: expected a path on the file system .* \(local paths"):
        load(dataset)[20]
    assert load(f"{dataset}?outside=true")[20]["image"] == IMAGE


@pytest.mark.parametrize("name", ["a.csv", "dataset_coco.json"])
def test_links_out_of_the_folder_are_bad_records_without_outside(folder, name):
    source = load(write(folder, [("a.jpg", "a"), ("link.jpg", "b")], name) + "?outside=false")
    assert source[0]["image"] == IMAGE
    with pytest.raises(BadRecordError, match="expected a path inside the folder"):
        source[1]


def test_links_of_folders_of_images(folder):
    (folder / "up").unlink()
    for name in ("a.txt", "link.txt"):
        (folder / name).write_text("text")
    assert len({load_source(str(folder), "train")[i]["image"] for i in range(2)}) == 1
    source = load_source(f"{folder}?outside=false", "train")
    assert source[0]["image"] == IMAGE
    with pytest.raises(BadRecordError, match="expected a path inside the folder"):
        source[1]


@pytest.mark.parametrize(
    "path,option,match",
    [
        ("memory://a.csv", "", "expected a path on the file system of the dataset"),
        ("{memory:,x}//a.csv", "", "expected a path on the file system of the dataset"),
        ("a.csv::memory://a.csv", "", "expected a path on the file system of the dataset"),
        ("a.csv?folder=memory://x", "", "expected a path on the file system of the dataset"),
        ("a.csv?outside=true", "", "expected outside=true at the mixture"),
        ("~/../a.csv", "?outside=false", "expected a path inside the folder"),
        ("{~,x}/*.csv", "", "no file matches"),
        ("*/../" * 12 + "*.tar", "", "expected wildcards in at most 4 components of a path, without"),
        ("{*,x}/{..,x}/*.tar", "", "expected wildcards in at most 4 components of a path, without"),
        ("**/*.tar", "", "expected wildcards in at most 4 components of a path, without"),
        ("*/" * 4 + "*.tar", "", "expected wildcards in at most 4 components of a path, without"),
        ("a?b.json", "", "expected a dataset that is no mixture"),
        ("{0..0}" * 800 + ".csv", "", "expected at most 4096 characters and 16 braces"),
        ("{0..0}" * 17 + ".csv", "", "expected at most 4096 characters and 16 braces"),
        ("x" * 5000 + "{0..1048575}.csv", "", "expected at most 4096 characters and 16 braces"),
        ("x" * 1000 + "{0..1048575}.csv", "", "expected at most 1048576 files in braces and 268435456 characters"),
        ("{" + "0" * 4000 + "..1048575}.csv", "", "expected braces such as"),
        ("x/../../a.csv", "?outside=false", "expected a path inside the folder"),
        ("up/*.csv", "?outside=false", "expected a path inside the folder"),
        ("{/etc,.}/a.csv", "?outside=false", "expected a path inside the folder"),
        ("a.csv?folder=..", "?outside=false", "expected a path inside the folder"),
        ("b.csv", "?outside=false", "has 1 of 1 paths outside"),
        ("{0..99999999999}.csv", "", "expected at most 1048576 files in braces"),
        ("{0..9999}{0..9999}.csv", "", "expected at most 1048576 files in braces"),
        ("m.json/", "", "expected a dataset that is no mixture"),
    ],
)
def test_components_of_mixtures_out_of_bounds(folder, path, option, match):
    write(folder, [("a.jpg", "a")])
    write(folder, [("../b.jpg", "b")], "b.csv")
    write(folder.parent, [("b.jpg", "a")])
    (folder / "m.json").write_text(json.dumps([{"path": path}]))
    with pytest.raises((ValueError, FileNotFoundError), match=rf"m\.json, component 0: .*{match}"):
        load_source(f"{folder}/m.json{option}", "train")


def test_components_of_mixtures_outside_are_counted(folder, caplog):
    write(folder, [("a.jpg", "a")])
    write(folder.parent, [("b.jpg", "b")])
    components = [{"path": path} for path in ("a.csv", f"{folder.parent}/a.csv", "a.csv?folder=../set")]
    (folder / "m.json").write_text(json.dumps(components))
    source = load_source(f"{folder}/m.json", "train")
    assert [source[i]["image"] for i in range(3)] == [IMAGE] * 3
    assert "m.json has 1 of 4 paths outside the folder" in caplog.text
    assert len(load_source(f"{folder}/m.json?outside=true", "train")) == 3


@pytest.mark.parametrize("base", ["absolute", "relative"])
@pytest.mark.parametrize("path", ["~/[a].csv", "a.csv::~/*.csv", "~b.csv"])
def test_components_of_mixtures_in_the_home_folder(folder, caplog, monkeypatch, base, path):
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder)
    write(folder.parent, [("b.jpg", "a")])
    write(folder, [("a.jpg", "a")])
    write(folder, [("a.jpg", "a")], "~b.csv")
    (folder / "m.json").write_text(json.dumps([{"path": path}]))
    source = load_source("m.json" if base == "relative" else f"{folder}/m.json", "train")
    assert source[0]["image"] == IMAGE
    assert ("paths outside the folder" in caplog.text) == ("~/" in path)


@pytest.mark.parametrize("dataset", ["a.csv", "m.json", ""])
def test_values_of_the_option(folder, dataset):
    write(folder, [("a.jpg", "a")])
    (folder / "m.json").write_text('[{"path": "a.csv"}]')
    with pytest.raises(ValueError, match="expected outside=true or outside=false, got outside=no"):
        load_source(f"{folder}/{dataset}?outside=no", "train")


def test_tables_on_other_file_systems(tmp_path, caplog):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    rows = ["memory:///paths/set/a.jpg", "memory://paths/b.jpg", "/etc/passwd", f"file://{tmp_path}/a.jpg"]
    (tmp_path / "a.jpg").write_bytes(IMAGE)
    for name in ("set/a.jpg", "b.jpg"):
        system.pipe(f"/paths/{name}", IMAGE)
    system.pipe("/paths/set/a.csv", "\n".join(["path,caption", *(f"{row},text" for row in rows)]).encode())
    source = load_source("memory://paths/set/a.csv", "train")
    assert "has 3 of 4 paths outside the folder" in caplog.text
    assert [source[i]["image"] for i in range(2)] == [IMAGE] * 2
    for index in (2, 3):
        with pytest.raises(BadRecordError, match=r"expected a path on the file system of the dataset \(memory://\)"):
            source[index]
