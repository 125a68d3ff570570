import bz2
import gzip
import io
import lzma
import os
import tarfile

import captioned
import pytest
from captioned import captions, keys, load

from infcl_jax.data import BadRecordError, load_source
from infcl_jax.data.sources import tar_scan
from infcl_jax.data.sources.captions import json_captions

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("folder", ["", "a/", "v1.0/", "d" * 80 + "/", "d" * 60 + "/" + "e" * 60 + "/", "grün 犬/é"])
def test_every_format_and_name_length(tmp_path, format, folder):
    samples = [(folder + key, contents) for key, contents in captioned.samples(3)]
    source = load(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples), format))
    assert captions(source) == ["caption 0", "caption 1", "caption 2"]
    assert [source[i]["image"] for i in range(3)] == [contents["jpg"] for _, contents in samples]
    assert keys(source) == [key for key, _ in samples]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_beyond_every_header(tmp_path, format):
    samples = [("x" * 150 + "/" + "ü" * 2000 + key, contents) for key, contents in captioned.samples(3)]
    source = load(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples), format))
    assert captions(source) == ["caption 0", "caption 1", "caption 2"]
    assert keys(source) == [key for key, _ in samples]


def test_names_in_another_encoding_stay_different(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for letter in "éè":
            for extension in ("jpg", "txt"):
                info = tarfile.TarInfo(f"{letter}.{extension}")
                info.size = 1
                tar.addfile(info, io.BytesIO(letter.encode("latin-1") if extension == "jpg" else b"a"))
    source = load(tmp_path / "a.tar")
    assert keys(source) == [r"\xe9", r"\xe8"] and [source[i]["image"] for i in range(2)] == [b"\xe9", b"\xe8"]


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


def test_caption_member_can_be_chosen(tmp_path):
    contents = {"jpg": b"image", "txt": b"text", "json": b'{"caption": "c", "alt": "json alt"}', "alt": b"alt"}
    captioned.write_tar(tmp_path / "a.tar", captioned.members([("0", contents)]))
    names = {"": "text", "?caption=alt": "alt", "?caption=json": "c", "?caption=json.alt": "json alt"}
    assert {option: load(f"{tmp_path}/a.tar{option}")[0]["caption"] for option in names} == names


@pytest.mark.parametrize("caption,expected", [("outputs.txt", "c"), ("my.json", "a"), ("my.json.b", "b")])
def test_members_with_further_dots_can_be_chosen(tmp_path, caption, expected):
    contents = {"input.jpg": b"image", "outputs.txt": b"c", "my.json": b'{"caption": "a", "b": "b"}'}
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members([("0", contents)]))
    source = load(f"{path}?caption={caption}&image=input.jpg")
    assert (source[0]["image"], source[0]["caption"]) == (b"image", expected)
    with pytest.raises(
        ValueError, match=rf"no image; the key of 0\.input\.jpg .*\?caption={caption}&image=input\.jpg;"
    ):
        load(f"{path}?caption={caption}")


DOTS = {"22": "22", "22.0": None, "a/22.1": None, "IMG 2023.01.00 (2)": None, "v1.0/b": "v1.0/b"}


def test_names_with_further_dots_are_counted_in_one_warning(tmp_path, caplog):
    samples = [(key, {"JPG": captioned.jpeg(i), "txt": b"a", "xyz": b"b"}) for i, key in enumerate(DOTS)]
    members = [*captioned.members(samples), ("a/._22.jpg", b"AppleDouble"), ("._22.0.txt", b"AppleDouble")]
    captioned.write_tar(tmp_path / "a.tar", members)
    source = load(captioned.write_tar(tmp_path / "b.tar", members).parent / "*.tar")
    assert keys(source) == 2 * [key for key in DOTS.values() if key]
    assert source.dropped == {"dotted name": 12}
    (message,) = caplog.messages
    assert (
        "dropped: 12 dotted name; the key of 22.0.JPG ends at the first dot (22), so its extension is 0.jpg" in message
    )
    captioned.write_tar(tmp_path / "a.tar", captioned.members(samples[1:4]))
    with pytest.raises(
        ValueError, match=r"no sample .*; dropped: 6 dotted name; the key of 22\.0\.JPG ends at the first"
    ):
        load(tmp_path / "a.tar")


# JSON without a caption; damaged JSON and other types are bad records.
EMPTY = ["null", "NaN", '""', '" \\n\u3000"', "[]", '[null, "", NaN]', "{}", '{"caption": null}',
         '{"caption": NaN, "x": 1}', '{"caption": "", "text": [" "]}', '{"caption": null, "exif": {"caption": "b"}}',
         '{"exif": "\\"caption\\": \\"b\\""}']  # fmt: skip
FULL = ['"a"', '["", "a"]', '{"caption": "a"}', '{"caption": null, "text": "a"}', '{"x": {}, "title": ["a"]}',
        '{"caption": ["\\u00e9"]}', '{"caption": 3}', '{"caption": ["a", 3]}', '{"caption": "a"', "3"]  # fmt: skip


@pytest.mark.parametrize("text", EMPTY + FULL)
def test_the_index_knows_captions_as_the_reader_does(tmp_path, text):
    for bom in (b"", b"\xef\xbb\xbf"):
        data = bom + text.encode()
        path = captioned.write_tar(
            tmp_path / "a.tar", [("0.jpg", b"image"), ("0.json", data), ("1.jpg", b"image"), ("1.txt", b"b")]
        )
        assert load(path).dropped == ({"no caption": 1} if text in EMPTY else {})
    try:
        assert bool(json_captions(text.encode())) == (text in FULL)
    except ValueError:
        assert text in FULL


@pytest.mark.parametrize("order", [("jpg", "txt", "json"), ("json", "txt", "jpg")])
@pytest.mark.parametrize("blank", [b"", b" \n\t", b"\xef\xbb\xbf", "\u3000".encode()])
def test_blank_captions_are_none(tmp_path, order, blank):
    contents = {"jpg": b"image", "txt": blank, "json": b'{"caption": "of json"}'}
    samples = [("0", {extension: contents[extension] for extension in order}), ("1", {"jpg": b"image", "txt": blank})]
    source = load(captioned.write_tar(tmp_path / "a.tar", captioned.members(samples)))
    assert captions(source) == ["of json"] and source.dropped == {"no caption": 1}


def compressed(tmp_path, compression):
    plain = captioned.write_tar(tmp_path / "plain.tar", captioned.members(captioned.samples(2))).read_bytes()
    data = {
        "gzip": gzip.compress,
        "bzip2": bz2.compress,
        "xz": lzma.compress,
        "zstd": lambda data: b"\x28\xb5\x2f\xfd" + data,
    }
    return data[compression](plain)


@pytest.mark.parametrize("compression,extension", [("gzip", "gz"), ("bzip2", "bz2"), ("xz", "xz"), ("zstd", "zst")])
def test_compressed_tars_are_refused(tmp_path, caplog, compression, extension):
    data = compressed(tmp_path, compression)
    for folder in ("magic", "name", "class"):
        (tmp_path / folder).mkdir()
    (tmp_path / "magic" / "b.tar").write_bytes(data)
    (tmp_path / "name" / f"b.tar.{extension}").write_bytes(data)
    (tmp_path / "class" / f"b.t{extension}").write_bytes(data)
    names = ["magic/b.tar", "magic", "magic/*.tar", "plain.tar::{}/magic/b.tar", "name", "name/*", "class"]
    for name in [*names, f"name/b.tar.{extension}"]:
        with pytest.raises(
            ValueError, match=rf"got .*/b\.t.*, which is compressed with {compression}; decompress it \("
        ):
            load(f"{tmp_path}/{name.format(tmp_path)}")
    (tmp_path / "plain.tar").rename(tmp_path / "name" / "a.tar")
    with pytest.raises(ValueError, match=rf"b\.tar\.{extension}, which is compressed with {compression}"):
        load(tmp_path / "name")
    assert caplog.messages == []


def test_incomplete_samples_are_dropped_and_counted(tmp_path, caplog):
    samples = captioned.samples(6)
    del samples[1][1]["jpg"], samples[2][1]["txt"], samples[3][1]["txt"]
    samples[4][1]["txt"] = b""
    members = [*captioned.members(samples), ("000000.txt", b"again"), ("readme", b"no extension"), ("000009.cls", b"3")]
    source = load(captioned.write_tar(tmp_path / "a.tar", members))
    assert captions(source) == ["caption 0", "caption 5"]
    assert source.dropped == {"duplicate member": 1, "no image": 1, "no caption": 3}
    assert "2 samples, dropped: 1 duplicate member, 1 no image, 3 no caption" in caplog.text


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize(
    "folder", ["__MACOSX", "a/@eaDir/0.jpg", ".ipynb_checkpoints", "./.Trash-0", "a" * 90 + "/.deep" * 3]
)
def test_hidden_folders_are_left_out(tmp_path, format, folder):
    hidden = [
        (f"{folder}/0", {"jpg": captioned.jpeg(1), "txt": b"hidden", "note": b""}),
        (f"{folder}/._1", {"jpg": b"a"}),
    ]
    names = ["./0", "../1", "a.d/...b", "lost+found"]
    samples = [(name, {"jpg": captioned.jpeg(0), "txt": name.encode()}) for name in names]
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members([*samples[:1], *hidden, *samples[1:]]), format)
    source = load_source(str(path), "train")
    assert [source[i]["caption"] for i in range(len(source))] == ["./0", "../1", "lost+found"]
    assert source.dropped == {"in a hidden folder": 2}


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


def test_data_behind_the_end_is_reported(tmp_path, caplog):
    path = captioned.write_tar(tmp_path / "a.tar", captioned.members(captioned.samples(2)))
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    stop = last.offset_data + 512
    data = path.read_bytes()
    path.write_bytes(data[:stop] + bytes(1024) + data)
    assert captions(load(path)) == ["caption 0", "caption 1"]
    assert f"a.tar: damaged: data follows the end-of-archive marker at byte {stop}" in caplog.text


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
