import json
import os
import pickle
import time
import zlib

import captioned
import numpy as np
import pytest
from captioned import captions, load

from infcl_jax.data import BadRecordError
from infcl_jax.data.sources import tar_index


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
    "older version": lambda header, entries: b"infcltar3" + len(header).to_bytes(8, "little") + header + entries,
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
    "dotted": changed(4, 3),
    "problem": changed(5, 3),
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


@pytest.mark.parametrize("field", [name for name in tar_index.ENTRY_DTYPE.names if name != "name_blocks"])
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
