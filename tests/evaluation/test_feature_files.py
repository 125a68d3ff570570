"""Feature files: every format returns what the shards hold."""

import numpy as np
import pytest

from infcl_jax.evaluation import FeatureRows, read_features
from infcl_jax.evaluation.feature_files import FEATURE_FILES, merge_shards, shard_counts, write_shard


@pytest.fixture
def shards(tmp_path):
    """Files and contents of shards, one of them empty, with keys of all kinds."""
    rng, contents = np.random.default_rng(0), []
    for number, rows in enumerate((5, 0, 3)):
        keys = [f"folder/{number} ü {row}\n" for row in range(rows)]
        contents.append(FeatureRows(rng.normal(size=(rows, 4)).astype(np.float32), 2**40 + np.arange(rows), keys))
        write_shard(tmp_path / f"{number}.safetensors", contents[-1], {"bad": number})
    return [tmp_path / f"{number}.safetensors" for number in range(3)], contents


@pytest.mark.parametrize("extension", FEATURE_FILES)
def test_merged_shards_hold_all_rows(shards, tmp_path, extension):
    paths, contents = shards
    assert merge_shards(tmp_path / f"features{extension}", paths) == (8, 4)
    rows = read_features(tmp_path / f"features{extension}")
    for name in ("feature", "index", "key"):
        np.testing.assert_array_equal(getattr(rows, name), np.concatenate([getattr(c, name) for c in contents]))
    assert (rows.feature.dtype, rows.index.dtype) == (np.float32, np.int64)
    assert [shard_counts(path) for path in paths] == [{"bad": number} for number in range(3)]


def test_keys_that_are_not_unicode_are_marked(tmp_path):
    key = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    write_shard(tmp_path / "0.safetensors", FeatureRows(np.zeros((1, 2)), np.zeros(1), [key]), {})
    assert read_features(tmp_path / "0.safetensors").key == ["caf\N{REPLACEMENT CHARACTER}.jpg"]


def test_unknown_extensions_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"extensions .safetensors, .npy, .parquet, got .*features.csv"):
        read_features(tmp_path / "features.csv")
