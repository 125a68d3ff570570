import os
import socket

import pytest

from infcl_jax.runtime.file_io import (
    open_regular,
    open_writable,
    parse_json,
    read_json,
    read_regular,
    remove_unfinished,
    replacing,
)


def special(folder, kind):
    """A path of a kind that is no regular file."""
    path = folder / kind
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(kind)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
def test_only_regular_files_are_opened(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an address of a socket has at most 107 bytes
    with pytest.raises(ValueError, match=rf"expected a regular file, got a {kind} at .*{kind}"):
        open_regular(special(tmp_path, kind))


def test_a_link_to_a_regular_file_is_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize(("size", "tail"), [(2**20, False), (2**20 + 1, True), (2**40, True)])
def test_at_most_the_limit_is_read(size, tail, tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)
    assert read_regular(tmp_path / "file", 2**20, tail=tail) == bytes(2**20)
    if tail:
        with pytest.raises(ValueError, match=r"^expected at most 1 MiB of data in .*file, got more$"):
            read_regular(tmp_path / "file", 2**20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 10**5, "nested too deeply"),
        (b"\xff\xfe", "expected JSON in config.json, got 'utf-8' codec"),
        (b"{", "expected JSON in config.json, got Expecting"),
        (b"null", "expected a JSON object in config.json, got NoneType"),
        ("9" * 5000, "expected JSON in config.json, got Exceeds the limit"),
    ],
)
def test_damaged_json_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text, "config.json")


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('["é"]', encoding="utf-8-sig")
    assert read_json(path, list) == ["é"]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    target, path = tmp_path / "target", tmp_path / "notes.txt"
    target.write_text("kept")
    path.symlink_to(target)
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert (target.read_text(), path.read_text(), path.is_symlink()) == ("kept", "new", False)
    assert path.stat().st_mode & 0o777 == target.stat().st_mode & 0o777  # of the umask


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["notes.txt"] and path.read_text() == "old"


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "link"])
def test_only_a_regular_file_is_opened_for_writing(kind, tmp_path):
    outside = tmp_path / "outside"
    if kind == "link":
        (path := tmp_path / kind).symlink_to(outside)
    else:
        path = special(tmp_path, kind)
    with pytest.raises(OSError, match=str(path)):
        open_writable(path, os.O_RDWR)
    assert not outside.exists()


def test_a_file_is_created_with_the_given_permissions(tmp_path):
    os.close(open_writable(tmp_path / "lock", os.O_RDWR, 0o600))
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_killed_writer_leaves_is_removed(tmp_path, inside):
    path, folder = tmp_path / "part-001.tar", tmp_path / "folder"
    folder.mkdir()
    others = [tmp_path / name for name in (".part-001.tar", ".part-001.aside.tar", "part-002.tar", ".part-001.tar.idx")]
    for other in others:
        other.touch()
    writer = replacing(path, folder if inside else None)
    temporary = writer.__enter__()  # never left, as by SIGKILL
    assert temporary.parent == (folder if inside else tmp_path)
    remove_unfinished(temporary.with_name("part-???.tar"))
    assert not temporary.exists() and all(other.exists() for other in others)
