"""Hostile and damaged checkpoints of PyTorch: one line, no memory beyond the file, no code."""

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
