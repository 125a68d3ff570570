"""Hostile and damaged checkpoints of PyTorch: one line, no memory beyond the file, no code."""

import pickle
import time
import tracemalloc
import warnings

import numpy as np
import pytest

from infcl_jax.models.convert.tensor_files import read_tensors
from infcl_jax.models.convert.torch_pickle import load_pickle
from tests.faults import torch_files
from tests.faults.torch_files import call, named, pickled, storage, tensor


@pytest.fixture(scope="module")
def array():
    return np.arange(24, dtype=np.float32).reshape(4, 6)


def test_written_tensors_are_read(tmp_path, array):
    tensors = {"table": array, "scale": np.array(3, np.int64), "empty": np.zeros((0, 3), np.float16)}
    torch_files.write_tensors(tmp_path / "x.pt", tensors)
    got = read_tensors(tmp_path / "x.pt")
    for name, expected in tensors.items():
        assert got[name].dtype == expected.dtype and got[name].shape == expected.shape
        np.testing.assert_array_equal(got[name], expected)


@pytest.mark.parametrize("name", [*torch_files.PICKLES, *torch_files.ARCHIVES])
def test_a_hostile_file_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_files, "BOMB", 2**26)
    torch_files.hostile(tmp_path / "x.pt", name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of repeated names
        with pytest.raises(ValueError, match=r"^expected .*x.pt.*; (save its state_dict|download it again)") as error:
            read_tensors(tmp_path / "x.pt")
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value) and not (tmp_path / "touched").exists()


@pytest.mark.parametrize("field", ["key", "count", "offset", "shape", "strides"])
@pytest.mark.parametrize("wrong", [None, True, -1, 2**40, 2**64, 1.5, "1", (2**62, 2**62), (-1, 2), [1]], ids=repr)
def test_a_tensor_stays_inside_its_storage(tmp_path, array, field, wrong):
    torch_files.write_changed(tmp_path / "x.pt", {"table": array}, {field: wrong}, "table")
    with pytest.raises(ValueError, match=r"^expected .* in .*x.pt; |^expected .*x.pt: .*; download it again$"):
        read_tensors(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("offset", "shape", "strides"), [(0, (24,), (1,)), (5, (3, 4), (6, 1)), (0, (6, 4), (1, 6)), (23, (1,), (2**40,))]
)
def test_views_have_the_strides_of_the_file(tmp_path, array, offset, shape, strides):
    pickle = pickled({"view": tensor(storage(), offset, shape, strides)})
    torch_files.write(tmp_path / "x.pt", pickle, {"data/0": array.tobytes()})
    steps = [4 * stride if n > 1 else 0 for n, stride in zip(shape, strides, strict=True)]
    expected = np.lib.stride_tricks.as_strided(array.reshape(-1)[offset:], shape, steps)
    np.testing.assert_array_equal(read_tensors(tmp_path / "x.pt")["view"], expected)


def test_an_expanded_tensor_names_the_fix(tmp_path):
    torch_files.hostile(tmp_path / "x.pt", "expanded")
    with pytest.raises(ValueError, match=r"got 1099511627776 in table \(clone\(\) copies an expanded tensor\) in "):
        read_tensors(tmp_path / "x.pt")


def test_attributes_of_a_state_dict_are_dropped():
    ordered = named("collections", "OrderedDict")
    state = torch_files.Raw(call(ordered) + torch_files.opcodes({"_metadata": {"": {"version": 1}}}) + b"b")
    assert load_pickle(pickled({"state_dict": state})) == {"state_dict": {}}


PLAIN = {  # values and the first protocol that has their opcodes
    "numbers": ({"small": True, "large": 2**3000, "negative": -(2**40)}, 1),
    "keys": ({1.5: 1, True: 2, None: [], (1, 2): (3,)}, 2),
    "bytes": ({"short": b"ab", "long": b"ab" * 200, b"key": 1}, 3),
    "sets": ({"set": {1, (2, 3)}, "frozenset": frozenset([1]), "empty": set()}, 4),
    "bytearray": ({"bytearray": bytearray(b"ab")}, 5),
}


@pytest.mark.parametrize(
    ("name", "protocol"), [(name, protocol) for name, (_, first) in PLAIN.items() for protocol in range(first, 6)]
)
def test_plain_values_beside_the_tensors_are_ignored(tmp_path, array, name, protocol):
    data = pickle.dumps(PLAIN[name][0], protocol)
    settings = torch_files.Raw(data[2 if protocol > 1 else 0 : -1])
    saved = pickled({"settings": settings, "state_dict": {"table": tensor(storage())}})
    torch_files.write(tmp_path / "x.pt", saved, {"data/0": array.tobytes()})
    np.testing.assert_array_equal(read_tensors(tmp_path / "x.pt")["table"], array)


@pytest.mark.parametrize("key", [3, 1.5, None, (1,), "k" * 1001], ids=lambda key: str(key)[:5])
def test_keys_that_are_no_names_are_dropped(key):
    assert load_pickle(pickled({"a": {key: 1, "b": 2}})) == {"a": {"b": 2}}


@pytest.mark.parametrize(
    "body", [b"]q\x01", b"]r\xff\xff\0\0", b"](e](e\x93", b"]q\0h\x01"], ids=["put", "long put", "class", "get"]
)
def test_a_wrong_operand_is_damage(body):
    with pytest.raises(ValueError, match=r"^a damaged pickle$"):
        load_pickle(b"\x80\x02" + body + b".")


def test_a_call_does_not_copy_its_arguments():
    arguments = b"](" + storage() + b"K\0))" + b"N" * 400_000 + b"eq\0"
    calls = (torch_files.REBUILD + b"q\x01](" + b"h\x01h\0R" * 30_000) + b"e."
    start = time.process_time()
    assert len(load_pickle(b"\x80\x02" + arguments + calls)) == 30_000
    assert time.process_time() - start < 10  # seconds; copies of the arguments take over 30


@pytest.mark.parametrize("name", ["compressed storage", "compressed pickle", "overlapping members", "larger size"])
def test_a_small_file_takes_little_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(torch_files, "BOMB", 2**28)
    torch_files.hostile(tmp_path / "x.pt", name)
    assert (tmp_path / "x.pt").stat().st_size < 2**21
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^expected .*x.pt"):
            read_tensors(tmp_path / "x.pt")
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
