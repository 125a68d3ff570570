"""Feature files: every format returns what the store holds."""

import numpy as np
import pytest

from infcl_jax.data import FeatureStore
from infcl_jax.evaluation import read_features
from infcl_jax.inference.feature_files import FEATURE_FILES, write_features

ROWS = (2, 0, 1, 0, 0, 3, 1)  # of each sample, in segments of three samples


def write_store(folder, rows=ROWS, segment_samples=3):
    """Write random features of samples, and return the store, the features and their samples."""
    store = FeatureStore(folder / "store", "key", len(rows), segment_samples)
    features = np.random.default_rng(0).normal(size=(sum(rows), 4)).astype(np.float32)
    starts = np.cumsum([0, *rows])
    for segment in range(store.segments):
        own = starts[[*store.segment_range(segment), store.segment_range(segment).stop]]
        store.write(segment, {"features": features[own[0] : own[-1]], "starts": own - own[0]})
    return store, features, np.repeat(np.arange(len(rows)), rows)


@pytest.mark.parametrize("extension", FEATURE_FILES)
@pytest.mark.parametrize("rows", [ROWS, (0, 0, 0, 1)])
def test_files_hold_all_rows_of_the_store(tmp_path, extension, rows):
    store, features, index = write_store(tmp_path, rows)
    assert write_features(tmp_path / f"features{extension}", store, "folder/ü {}\n".format) == features.shape
    read = read_features(tmp_path / f"features{extension}")
    np.testing.assert_array_equal(read.feature, features)
    np.testing.assert_array_equal(read.index, index)
    assert list(read.key) == [f"folder/ü {i}\n" for i in index]
    assert (read.feature.dtype, read.index.dtype) == (np.float32, np.int64)


def test_keys_that_are_not_unicode_are_marked(tmp_path):
    store, _, _ = write_store(tmp_path, (1,))
    write_features(tmp_path / "a.safetensors", store, lambda _: b"caf\xe9.jpg".decode("utf-8", "surrogateescape"))
    assert read_features(tmp_path / "a.safetensors").key == ["caf\N{REPLACEMENT CHARACTER}.jpg"]


def test_unknown_extensions_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"extensions .safetensors, .npy, .parquet, got .*features.csv"):
        read_features(tmp_path / "features.csv")
