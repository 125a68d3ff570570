"""Checkpoints of PyTorch with hand-written pickles, valid, damaged and hostile."""

import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.case import choose
from tests.faults.json_damage import WRONG

BOMB = 2**30  # bytes of decompressed zeros
_KINDS = {"float32": "FloatStorage", "float16": "HalfStorage", "int64": "LongStorage", "bfloat16": "BFloat16Storage"}


class Raw(bytes):
    """Opcodes of a value."""


def named(module: str, name: str) -> Raw:
    """Return the opcode of a class or function."""
    return Raw(f"c{module}\n{name}\n".encode())


def opcodes(value: Any) -> bytes:
    """Encode a value by opcodes of protocol 2, and 4 for long strings."""
    if isinstance(value, Raw):
        return value
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, tuple):
        return b"(" + b"".join(map(opcodes, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(opcodes, value)) + b"e"
    return b"}(" + b"".join(opcodes(item) for pair in value.items() for item in pair) + b"u"


def call(function: Raw, *arguments: Any) -> Raw:
    """Return the opcodes of a call."""
    return Raw(function + opcodes(arguments) + b"R")


def storage(kind: str = "FloatStorage", key: Any = "0", count: Any = 24) -> Raw:
    """Return the opcodes of a reference to a storage."""
    return Raw(opcodes(("storage", named("torch", kind), key, "cpu", count)) + b"Q")


REBUILD = named("torch._utils", "_rebuild_tensor_v2")


def tensor(store: Any, offset: Any = 0, shape: Any = (4, 6), strides: Any = (6, 1)) -> Raw:
    """Return the opcodes of a tensor."""
    return call(REBUILD, store, offset, shape, strides, False, call(named("collections", "OrderedDict")))


def pickled(value: Any) -> bytes:
    """Return a pickle."""
    return b"\x80\x02" + opcodes(value) + b"."


def write(path: Path, pickle: bytes, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write the zip file of `torch.save`."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in {"data.pkl": pickle, "byteorder": b"little", **members}.items():
            archive.writestr(f"archive/{name}", data)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as `torch.save` does."""
    write_changed(path, tensors, {})


def write_changed(path: Path, tensors: Mapping[str, np.ndarray], changes: Mapping[str, Any], name: str = "") -> None:
    """Write tensors, one of them with other arguments."""
    rebuilt, members = {}, {}
    for number, (other, array) in enumerate(tensors.items()):
        members[f"data/{number}"] = array.tobytes()
        fields: dict[str, Any] = {"kind": _KINDS[array.dtype.name], "key": str(number), "count": array.size}
        fields |= {"offset": 0, "shape": array.shape}
        fields["strides"] = tuple(step // array.itemsize for step in np.asarray(array, order="C").strides)
        fields |= changes if other == name else {}
        rebuilt[other] = tensor(
            storage(fields["kind"], fields["key"], fields["count"]),
            fields["offset"],
            fields["shape"],
            fields["strides"],
        )
    write(path, pickled({"epoch": 3, "state_dict": rebuilt}), members)


def damage(path: Path, tensors: Mapping[str, np.ndarray], rng: np.random.Generator) -> str:
    """Write tensors, one of them with a wrong argument; return the name of the damage."""
    field = choose(("kind", "key", "count", "offset", "shape", "strides"), rng)
    values = [*WRONG, (), (-1, 2), (2**40, 2**40), (True, 3), (1,) * 70, ((1,), 2)]
    value = choose(("IntStorage", "NoStorage", "DoubleStorage") if field == "kind" else values, rng)
    write_changed(path, tensors, {field: value}, choose(list(tensors), rng))
    return f"argument {field}"


ONE = {"data/0": bytes(96)}
_TENSOR = tensor(storage())
_GLOBAL = named("torch._utils", "_rebuild_parameter")
_NEST = b"(t" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))  # 2**60 nested tuples


def _state(value: Any) -> bytes:
    return pickled({"table": value})


PICKLES: dict[str, bytes] = {
    "tensor as storage": _state(tensor(_TENSOR, 2**20, (10_000_000,), (1,))),
    "text as storage": _state(tensor("0" * 96)),
    "beyond": _state(tensor(storage(), 1)),
    "far beyond": _state(tensor(storage(), 2**40)),
    "overflow": _state(tensor(storage(), 0, (2**62, 2), (2**62, 1))),
    "expanded": _state(tensor(storage(count=24), 0, (2**40,), (0,))),
    "defaults of a function": _state(
        Raw(_GLOBAL + opcodes((None, {"__defaults__": (1,), "__code__": None, "name": "x"})) + b"b")
    ),
    "state of a class": _state(Raw(named("collections", "OrderedDict") + opcodes((None, {"fromkeys": 1})) + b"b")),
    "state of a tensor": _state(Raw(_TENSOR + opcodes((1, (2**40,), "O", False, "")) + b"b")),
    "call of a function": _state(call(named("os", "system"), "touch touched")),
    "call of a tensor": _state(Raw(_TENSOR + opcodes(()) + b"R")),
    "new object": _state(Raw(named("collections", "OrderedDict") + b")\x81")),
    "memo of gigabytes": pickled(Raw(b"]r" + struct.pack("<I", 2**31 - 1))),
    "nested tuple as key": pickled(Raw(b"}" + _NEST + b"Ns")),
    "colliding keys": pickled(Raw(b"}(" + b"".join(opcodes(i * (2**61 - 1)) + b"N" for i in range(200_000)) + b"u")),
    "deep": pickled(Raw(b"]" * 100_000 + b"a" * 99_999)),
    "many objects": pickled(Raw(b"(" + b"}" * 1_000_000 + b"t")),
    "wrong length of a string": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc.",
    "wrong frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"].",
    "long number": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"\1.",
    "extension": b"\x80\x02\x82\x01.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "endless": b"\x80\x02}",
    "self": pickled(Raw(b"}q\0X\5\0\0\0modelh\0s")),
    "name of a class": _state(call(Raw(opcodes("m\x1b[2J\n") + opcodes("\u202e") + b"\x93"))),
    "number as name": pickled({3: _TENSOR}),
    "no tensors": pickled([1, 2]),
}


def _edited(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replace bytes of a valid file."""

    def build(path: Path) -> None:
        write(path, _state(_TENSOR), ONE)
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new))

    return build


def _bomb(name: str) -> Callable[[Path], None]:
    """Compress a gigabyte of zeros to one megabyte."""

    def build(path: Path) -> None:
        count = BOMB // 4
        pickle = _state(tensor(storage(count=count), 0, (count,), (1,)))
        members = {"data.pkl": pickle, "byteorder": b"little", **ONE}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for member, data in members.items():
                with archive.open(f"archive/{member}", "w") as file:
                    for _ in range(BOMB >> 20 if member == name else 0):
                        file.write(bytes(2**20))
                    if member != name:
                        file.write(data)

    return build


def _overlapping(path: Path) -> None:
    """Point the entries of 1000 storages to the same megabyte."""
    names = [str(number) for number in range(1000)]
    tensors = {f"t{name}": tensor(storage(key=name, count=2**18), 0, (2**18,), (1,)) for name in names}
    write(path, pickled(tensors), {"data/0": bytes(2**20)})
    with zipfile.ZipFile(path, "a") as archive:
        first = archive.getinfo("archive/data/0")
        for name in names[1:]:
            info = zipfile.ZipInfo(f"archive/data/{name}")
            for field in ("header_offset", "CRC", "compress_size", "file_size", "compress_type"):
                setattr(info, field, getattr(first, field))
            archive.filelist.append(info)
        archive._didModify = True


def _repeated(path: Path) -> None:
    """Write two members of the same name."""
    write(path, _state(_TENSOR), ONE)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")  # of the repeated name
        archive.writestr("archive/data/0", bytes(96))


def _sizes(stored: int, size: int) -> Callable[[Path], None]:
    """Change the sizes in all headers of the storage."""

    def build(path: Path) -> None:
        write(path, _state(tensor(storage(count=size // 4), 0, (size // 4,), (1,))), ONE)
        path.write_bytes(path.read_bytes().replace(struct.pack("<II", 96, 96), struct.pack("<II", stored, size)))

    return build


ARCHIVES: dict[str, Callable[[Path], None]] = {
    "compressed storage": _bomb("data/0"),
    "compressed pickle": _bomb("data.pkl"),
    "compressed byte order": _bomb("byteorder"),
    "overlapping members": _overlapping,
    "repeated member": _repeated,
    "encrypted": _edited(b"\x14\0\0\0\0\0", b"\x14\0\1\0\0\0"),
    "unknown compression": _edited(b"\x14\0\0\0\0\0", b"\x14\0\0\0\x63\0"),
    "larger sizes": _sizes(2**31, 2**31),
    "larger size": _sizes(96, 2**31),
    "sizes of zip64": _sizes(2**32 - 1, 2**32 - 1),
    "no member": _edited(b"archive/data/0", b"archive/data/1"),
    "big-endian": _edited(b"little", b"bigbig"),
}


def hostile(path: Path, name: str) -> None:
    """Write the hostile file of a name in `PICKLES` or `ARCHIVES`."""
    if name in PICKLES:
        write(path, PICKLES[name], ONE)
    else:
        ARCHIVES[name](path)
