import os

import numpy as np
import pytest
from safetensors.numpy import save

from infcl_jax.data.feature_store import FeatureStore, _checksum

GOOD = {"features": np.zeros((3, 2), np.float32), "starts": np.array([0, 1, 3])}


def write(path, arrays):
    path.write_bytes(save(arrays, {"key": "k", "checksum": _checksum(arrays)}))


@pytest.mark.parametrize(
    "changes,problem",
    [
        ({}, None),
        ({"starts": np.array([0, 3, 1])}, "damaged: wrong first rows"),
        ({"starts": np.array([1, 2, 3])}, "damaged: wrong first rows"),
        ({"starts": np.array([0, 1, 4])}, "damaged: wrong first rows"),
        ({"starts": np.array([0, 3])}, "foreign: of another number"),
        ({"starts": np.array([[0, 1, 3]])}, "foreign: of another number"),
        ({"starts": None}, "foreign: of another number"),
        ({"features": None}, "foreign: of another number"),
    ],
)
def test_segments_with_other_arrays_are_not_used(tmp_path, changes, problem):
    store = FeatureStore(tmp_path, "k", 2)
    write(store.path(0), {name: array for name, array in (GOOD | changes).items() if array is not None})
    result = store.problem(0)
    assert result is None if problem is None else result.startswith(problem)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_special_files_are_no_segments(tmp_path, make):
    store = FeatureStore(tmp_path, "k", 2)
    make(store.path(0))
    assert store.problem(0) == "missing"
    with pytest.raises(ValueError, match="expected a regular file, got a"):
        store.features(0)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"features": 3}',
        b'{"features": {"dtype": "F32", "shape": [3, 2], "data_offsets": "ab"}}',
        b'{"features": {"dtype": "X", "shape": [3, 2], "data_offsets": [0, 24]}}',
        b'{"features": {"dtype": "F32", "shape": [9, 2], "data_offsets": [0, 24]}}',
        b'{"features": {"dtype": "F32", "data_offsets": [0, 24]}}',
    ],
)
def test_damaged_headers_are_named(tmp_path, header):
    store = FeatureStore(tmp_path, "k", 2)
    store.path(0).write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(ValueError, match=r"^expected a segment of features at .*segment-000000\.safetensors, got "):
        store.features(0)
