import json
import os
import pickle
import tarfile
import time
import zlib

import captioned
import numpy as np
import pytest

from infcl_jax.data import BadRecordError, load_source
from infcl_jax.data.sources import tar_index, tar_scan

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def load(path, split="train"):
    return load_source(str(path), split)


def captions(source):
    return [source[index]["caption"] for index in range(len(source))]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("folder", ["", "a/", "d" * 80 + "/", "d" * 60 + "/" + "e" * 60 + "/", "grün/"])
def test_every_format_and_name_length(tmp_path, format, folder):
    samples = [(folder + key, contents) for key, contents in captioned.samples(3)]
    source = load(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples), format))
    assert captions(source) == ["caption 0", "caption 1", "caption 2"]
    assert [source[i]["image"] for i in range(3)] == [contents["jpg"] for _, contents in samples]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_beyond_every_header(tmp_path, format):
    samples = [("x" * 150 + "/" + "y" * 200 + key, contents) for key, contents in captioned.samples(3)]
    source = load(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples), format))
    assert captions(source) == ["caption 0", "caption 1", "caption 2"]


def test_base_256_and_pax_sizes(tmp_path):
    data = captioned.jpeg(0)
    info = tarfile.TarInfo("0.jpg")
    info.size = len(data)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + len(data).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 256)
    text = tarfile.TarInfo("0.txt")
    text.pax_headers, text.size = {"size": "3"}, 3
    blocks = [bytes(header), data, bytes(-len(data) % 512), text.tobuf(tarfile.PAX_FORMAT), b"cat", bytes(509 + 1024)]
    (tmp_path / "a.tar").write_bytes(b"".join(blocks))
    source = load(tmp_path / "a.tar")
    assert (source[0]["image"], source[0]["caption"]) == (data, "cat")


def test_members_of_a_sample_in_any_order(tmp_path):
    samples = captioned.samples(4)
    names = captioned.members(samples)
    orders = [names, names[::-1], names[::2] + names[1::2], names[1::2] + names[::2]]
    for number, order in enumerate(orders):
        source = load(captioned.write_tar(tmp_path / f"{number}.tar", order))
        expected = (
            ["caption 3", "caption 2", "caption 1", "caption 0"] if number == 1 else [f"caption {i}" for i in range(4)]
        )
        assert captions(source) == expected
        assert source[0]["image"] == captioned.jpeg(3 if number == 1 else 0)


def test_captions_of_json_members(tmp_path):
    texts = [{"caption": "a"}, {"text": ["b", "c"]}, ["d"], "e"]
    samples = [(str(i), {"png": b"image", "json": json.dumps(text).encode()}) for i, text in enumerate(texts)]
    source = load(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples)))
    assert [source[i]["captions"] for i in range(4)] == [("a",), ("b", "c"), ("d",), ("e",)]


def test_caption_member_can_be_chosen(tmp_path):
    contents = {"jpg": b"image", "txt": b"text", "json": b'{"caption": "c", "alt": "json alt"}', "alt": b"alt"}
    captioned.write_tar(tmp_path / "a.tar", captioned.members([("0", contents)]))
    names = {"": "text", "?caption=alt": "alt", "?caption=json": "c", "?caption=json.alt": "json alt"}
    assert {option: load(f"{tmp_path}/a.tar{option}")[0]["caption"] for option in names} == names


def test_incomplete_samples_are_dropped_and_counted(tmp_path, caplog):
    samples = captioned.samples(6)
    del samples[1][1]["jpg"], samples[2][1]["txt"], samples[3][1]["txt"]
    samples[4][1]["txt"] = b""
    members = [*captioned.members(samples), ("000000.txt", b"again"), ("readme", b"no extension"), ("000009.cls", b"3")]
    source = load(captioned.write_tar(tmp_path / "a.tar", members))
    assert captions(source) == ["caption 0", "caption 5"]
    assert source.dropped == {"duplicate member": 1, "no image": 1, "no caption": 3}
    assert "2 samples, dropped: 1 duplicate member, 1 no image, 3 no caption" in caplog.text


def test_folders_and_links_are_no_members(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/0.jpg", tarfile.SYMTYPE), ("d/1.jpg", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("0.jpg", "0.txt"):
            info = tarfile.TarInfo(name)
            info.size = 0
            tar.addfile(info)
    with pytest.raises(ValueError, match=r"a\.tar has no sample with an image and a caption \(txt or json\)"):
        load(tmp_path / "a.tar")


@pytest.mark.parametrize("cut", ["contents", "header", "padding"])
def test_truncated_shards_keep_the_samples_before(tmp_path, caplog, cut):
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(5)))
    captioned.write_tar(tmp_path / "b.tar", captioned.members(captioned.samples(5, start=5)))
    with tarfile.open(path) as tar:
        member = tar.getmembers()[6]  # the fourth image
    stop = {
        "contents": member.offset_data + 10,
        "header": member.offset + 100,
        "padding": member.offset_data + member.size,
    }[cut]
    path.write_bytes(path.read_bytes()[:stop])
    source = load(tmp_path / "{a,b}.tar")
    assert captions(source) == [f"caption {i}" for i in (0, 1, 2, 5, 6, 7, 8, 9)]
    messages = {
        "contents": f"the member at byte {member.offset} ends at byte {member.offset_data + member.size} of {stop}",
        "header": f"the header at byte {member.offset} has 100 of 512 bytes",
        "padding": f"no end-of-archive marker at byte {stop}",
    }
    assert f"a.tar: truncated: {messages[cut]}, the rest of the file is left out" in caplog.text


@pytest.mark.parametrize("end", ["missing", "early"])
def test_missing_and_early_ends_are_reported(tmp_path, caplog, end):
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(2)))
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    stop = last.offset_data + 512
    data = path.read_bytes()
    path.write_bytes(data[:stop] if end == "missing" else data[:stop] + bytes(1024) + data)
    assert captions(load(path)) == ["caption 0", "caption 1"]
    messages = {
        "missing": f"a.tar: truncated: no end-of-archive marker at byte {stop}",
        "early": f"a.tar: damaged: data follows the end-of-archive marker at byte {stop}",
    }
    assert messages[end] in caplog.text


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damaged", [(3,), (1, 2), (0, 3, 4)])
def test_samples_without_damaged_headers_are_read(tmp_path, caplog, format, damaged):
    samples = [(f"{'a' * 120}/{key}", contents) for key, contents in captioned.samples(5)]  # with extended headers
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(samples), format)
    with tarfile.open(path) as tar:
        headers = [member.offset for member in tar.getmembers()]  # of the extended headers
    data = bytearray(path.read_bytes())
    for number in damaged:
        data[headers[2 * number] + 5] ^= 1  # of the image
    path.write_bytes(data)
    source = load(path)
    intact = [f"caption {i}" for i in range(5) if i not in damaged]
    assert [caption for caption in captions(source) if caption in intact] == intact
    first = 2 * damaged[0]
    following = headers[first + 1] if format == tarfile.USTAR_FORMAT else headers[first] + 1024  # the member itself
    message = f"the checksum of the header at byte {headers[first]} differs, continued at byte {following}"
    assert f"a.tar: damaged: {message}" in caplog.text


def test_damaged_members_name_dataset_shard_and_key(tmp_path):
    samples = captioned.samples(3)
    samples[1][1]["txt"] = b"\xff\xfe"
    samples[2][1].pop("txt")
    samples[2][1]["json"] = b"{"
    source = load(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples)))
    with pytest.raises(BadRecordError, match=r"bad record 1 of .*, split train \(a\.tar, key 000001\): .*not UTF-8"):
        source[1]
    with pytest.raises(BadRecordError, match=r"bad record 2 of .*, split train \(a\.tar, key 000002\): "):
        source[2]
    with pytest.raises(IndexError):
        source[3]


def test_a_shard_that_shrinks_gives_bad_records(tmp_path):
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(5)))
    source = load(path)
    os.truncate(path, 1000)
    with pytest.raises(BadRecordError, match=r"expected .* bytes at byte .* the file is truncated"):
        source[4]


def count_scans(monkeypatch):
    scanned = []
    original = tar_index.tar_scan.scan_file
    monkeypatch.setattr(tar_index.tar_scan, "scan_file", lambda path, *a: scanned.append(path) or original(path, *a))
    return scanned


def test_index_is_built_once_and_again_for_changed_shards(tmp_path, monkeypatch):
    scanned = count_scans(monkeypatch)
    paths = [
        str(captioned.write_tar(tmp_path / f"{i}.tar", captioned.members(captioned.samples(3, 3 * i))))
        for i in range(3)
    ]
    expected = captions(load(tmp_path / "*.tar"))
    assert scanned == paths
    assert captions(load(tmp_path / "{0..2}.tar")) == expected and scanned == paths
    captioned.write_tar(tmp_path / "1.tar", captioned.members(captioned.samples(2, 100)))
    assert captions(load(tmp_path / "*.tar")) == [*expected[:3], "caption 100", "caption 101", *expected[6:]]
    assert scanned == [*paths, paths[1]]
    time_later = time.time() + 10
    os.utime(paths[2], (time_later, time_later))
    assert len(load(tmp_path / "*.tar")) == 8 and scanned == [*paths, paths[1], paths[2]]
    os.rename(tmp_path, f"{tmp_path}_moved")
    assert len(load(f"{tmp_path}_moved/*.tar")) == 8 and len(scanned) == 5
    load(f"{tmp_path}_moved/{{0,1}}.tar")
    assert len(scanned) == 7


def index_file(header, entries):
    """Index with the right checksum."""
    text = header + bytes(-(len(header) + 21) % 64)
    checksum = zlib.crc32(text + entries)
    return tar_index._MAGIC + len(header).to_bytes(8, "little") + checksum.to_bytes(4, "little") + text + entries


def changed(field, value):
    """Function that changes a field of the first shard."""

    def change(header, entries):
        content = json.loads(header)
        content["shards"][0][field] = value
        return index_file(json.dumps(content).encode(), entries)

    return change


DAMAGE = {
    "empty": lambda header, entries: b"",
    "magic alone": lambda header, entries: tar_index._MAGIC,
    "other file": lambda header, entries: b"garbage" * 100,
    "older version": lambda header, entries: b"infcltar2" + len(header).to_bytes(8, "little") + header + entries,
    "cut": lambda header, entries: index_file(header, entries)[:-5],
    "flipped": lambda header, entries: index_file(header, entries)[:-5] + b"\xff" + index_file(header, entries)[-4:],
    "header of 2^64 bytes": lambda header, entries: tar_index._MAGIC + b"\xff" * 8 + bytes(100),
    "not UTF-8": lambda header, entries: index_file(b"\xff\xfe", entries),
    "nested": lambda header, entries: index_file(b"[" * 100_000, entries),
    "list": lambda header, entries: index_file(b"[]", entries),
    "no shards": lambda header, entries: index_file(b"{}", entries),
    "empty shard": lambda header, entries: index_file(b'{"shards": [[]]}', entries),
    "count": changed(2, 10**30),
    "negative": changed(2, -1),
    "another count": changed(2, 2),
    "dropped": changed(3, ["no image"]),
    "dropped count": changed(3, {"no image": "1"}),
    "dropped count of 4300 digits": changed(3, {"no image": int("9" * 4300)}),
    "negative dropped count": changed(3, {"no image": -1}),
    "problem": changed(4, 3),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_index_is_rebuilt(tmp_path, caplog, damage):
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(3)))
    load(path)
    (cache,) = tmp_path.glob(".tar_index_*")
    data = cache.read_bytes()
    header, entries = data[21:].partition(b"\0")[0], data[-3 * tar_index.ENTRY_DTYPE.itemsize :]
    assert index_file(header, entries) == data
    cache.write_bytes(DAMAGE[damage](header, entries))
    for _ in range(2):
        assert captions(load(path)) == ["caption 0", "caption 1", "caption 2"]
    assert [f"{path}: the index is built again: " in message for message in caplog.messages] == [True]
    assert cache.read_bytes() == data


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_special_files_in_place_of_an_index(tmp_path, make):
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(2)))
    load(path)
    (cache,) = tmp_path.glob(".tar_index_*")
    cache.unlink()
    make(cache)
    assert captions(load(path)) == ["caption 0", "caption 1"]


@pytest.mark.parametrize("field", tar_index.ENTRY_DTYPE.names)
def test_wrong_entries_of_an_index_give_bad_records(tmp_path, field):
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(2)))
    load(path)
    (cache,) = tmp_path.glob(".tar_index_*")
    data = cache.read_bytes()
    entries = np.frombuffer(data[-2 * tar_index.ENTRY_DTYPE.itemsize :], tar_index.ENTRY_DTYPE).copy()
    entries[field][0] = np.iinfo(entries[field].dtype).max
    cache.write_bytes(index_file(data[21:].partition(b"\0")[0], entries.tobytes()))
    source = load(path)
    with pytest.raises(BadRecordError, match="bad record 0 "):
        source[0]
    assert source[1]["caption"] == "caption 1"


@pytest.mark.parametrize("extension,size", [("txt", 2**20), ("json", 2**23), ("jpg", 2**30)])
@pytest.mark.parametrize("gap", [0, 2**17])
def test_members_beyond_the_limits_are_not_read(tmp_path, extension, size, gap):
    other = "jpg" if extension != "jpg" else "txt"
    with open(tmp_path / "a.tar", "wb") as file:  # sparse
        for name, length in ((f"0.{other}", 3), ("gap", gap), (f"0.{extension}", size + 1)):
            info = tarfile.TarInfo(name)
            info.size = length
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            file.seek(-(-length // 512) * 512, os.SEEK_CUR)
        file.truncate(file.tell() + 1024)
    with pytest.raises(BadRecordError, match=f"expected at most {size} bytes in .*, got {size + 1}"):
        load(tmp_path / "a.tar")[0]


@pytest.mark.parametrize("record", [b"size", b"length"])
def test_pax_numbers_of_thousands_of_digits(tmp_path, record):
    digits = b"9" * 5000
    text = b" size=" + digits + b"\n" if record == b"size" else digits + b" size=3\n"
    if record == b"size":
        text = str(len(text) + 4).encode() + text
    extended = tarfile.TarInfo("pax")
    extended.size, extended.type = len(text), tarfile.XHDTYPE
    block = extended.tobuf(tarfile.USTAR_FORMAT) + text + bytes(-len(text) % 512)
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(2)))
    path.write_bytes(block + path.read_bytes())
    assert captions(load(path)) == ["caption 0", "caption 1"]


@pytest.mark.parametrize("count", [tar_scan._MAX_RECORDS - 1, tar_scan._MAX_RECORDS])
def test_pax_headers_of_many_records(count):
    assert tar_scan._pax(b"2 " * count + b"10 path=a\n") == ("a" if count < tar_scan._MAX_RECORDS else None, None)


def test_index_goes_to_the_cache_folder_or_stays_in_memory(tmp_path, monkeypatch):
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(3)))
    refused = [f"{tmp_path}/"]
    original = tar_index._write

    def write(path, *arguments):
        if any(path.startswith(folder) for folder in refused):
            raise PermissionError(path)
        original(path, *arguments)

    monkeypatch.setattr(tar_index, "_write", write)
    user_cache = tmp_path.parent / f"{tmp_path.name}_cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(user_cache))
    assert captions(load(path)) == ["caption 0", "caption 1", "caption 2"]
    assert len(list((user_cache / "infcl_jax").iterdir())) == 1
    for cache in (user_cache / "infcl_jax").iterdir():
        cache.unlink()
    refused.append(str(user_cache))
    source = load(path)
    assert source._index.path is None
    assert captions(pickle.loads(pickle.dumps(source))) == ["caption 0", "caption 1", "caption 2"]
    monkeypatch.setattr(tar_index, "user_cache", lambda: tar_index.Path("~nobody-of-this-name"))  # no home directory
    assert load(path)._index.path is None


def test_many_shards_are_scanned_in_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_index.os, "sched_getaffinity", lambda pid: {0, 1})
    for number in range(11):
        captioned.write_tar(tmp_path / f"{number:02d}.tar", captioned.members(captioned.samples(2, 2 * number)))
    scanned = count_scans(monkeypatch)
    assert captions(load(tmp_path / "{00..10}.tar")) == [f"caption {i}" for i in range(22)]
    assert scanned == []


def test_pickled_sources_reopen_their_files(tmp_path):
    captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(3)))
    source = load(tmp_path / "a.tar")
    assert source[1] == pickle.loads(pickle.dumps(source))[1]
    assert len(pickle.dumps(source)) < 2000 and isinstance(source._index.entries, np.memmap)
    data = pickle.dumps(source)
    captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(2)))
    load(tmp_path / "a.tar")
    with pytest.raises(ValueError, match=r"expected 3 samples in the tar index .*, got 2"):
        pickle.loads(data)


def test_remote_shards(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for number in range(2):
        path = captioned.write_tar(tmp_path / f"{number}.tar", captioned.members(captioned.samples(3, 3 * number)))
        system.pipe(f"/tars/{number}.tar", path.read_bytes())
    for pattern in ("memory://tars/{0..1}.tar", "memory://tars/*.tar"):
        source = load(pattern)
        assert captions(source) == [f"caption {i}" for i in range(6)]
        assert source[4]["image"] == captioned.jpeg(4)
    with pytest.raises(
        FileNotFoundError, match=r"1 of the 3 shards of .* do not exist, the first is memory://tars/2.tar"
    ):
        load("memory://tars/{0..2}.tar")
