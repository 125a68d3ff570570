"""Nearest neighbors: those of brute force in float64, with memory that does not grow with the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.evaluation import top_k
from infcl_jax.inference import search
from infcl_jax.inference.features import l2_normalize
from infcl_jax.runtime.mesh import data_mesh, replicate


def brute_force(query, gallery, k):
    """Sorts the whole matrix in float64; equal similarities by index."""
    unit = [l2_normalize(x).astype(np.float64) for x in (query, gallery)]
    similarity = unit[0] @ unit[1].T
    index = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(similarity, index, axis=1), index


def features(rows, dim=16, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(search, "_QUERY_ROWS", 7)
    monkeypatch.setattr(search, "_GALLERY_ROWS", 5)


@pytest.fixture
def groups(monkeypatch):
    """Tiles of 32 rows in eight groups, searched anew by each test."""
    monkeypatch.setattr(search, "_TILE_ROWS", (32,))
    monkeypatch.setattr(search, "_GROUPS", 8)
    monkeypatch.setattr(search, "_PADDED_SHARE", 1)
    search._candidates.clear_cache()
    yield
    search._candidates.clear_cache()


def check(query, gallery, k, devices):
    similarity, index = top_k(query, gallery, k, data_mesh(jax.devices()[:devices]))
    expected_similarity, expected_index = brute_force(query, gallery, k)
    assert similarity.dtype == np.float32 and index.dtype == np.int32
    np.testing.assert_array_equal(index, expected_index)
    np.testing.assert_allclose(similarity, expected_similarity, atol=1e-6)


def test_equals_brute_force():
    check(features(2100, 32), features(5000, 32, seed=1), 10, devices=8)


@pytest.mark.parametrize(
    ("queries", "gallery", "k", "devices"), [(1, 1, 1, 8), (20, 13, 13, 1), (7, 101, 3, 8), (15, 64, 20, 1)]
)
@pytest.mark.usefixtures("small_tiles")
def test_odd_sizes(queries, gallery, k, devices):
    check(features(queries), features(gallery, seed=1), k, devices)


@pytest.mark.parametrize(
    ("queries", "gallery", "k", "devices"), [(5, 500, 3, 4), (3, 517, 4, 1), (2, 500, 5, 4), (9, 40, 1, 1)]
)
@pytest.mark.usefixtures("groups")
def test_groups_of_columns(monkeypatch, queries, gallery, k, devices):
    monkeypatch.setattr(search, "_MARGIN", 0)
    check(features(queries), features(gallery, seed=1), k, devices)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.usefixtures("groups")
def test_groups_keep_the_order_of_equal_scores(count):
    score = np.random.default_rng(0).integers(0, 4, (200, 32)).astype(np.float32)
    best, row = search._best_of_tile(jnp.asarray(score), jnp.arange(32) + 7, count)
    order = np.argsort(-score, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(row, order + 7)
    np.testing.assert_array_equal(best, np.take_along_axis(score, order, axis=1))


@pytest.mark.parametrize(
    ("rows", "tile"), [(65_536, 65_536), (10**6, 65_536), (70_000, 16_384), (50_000, 8_192), (5000, None)]
)
def test_tiles_pad_few_rows(rows, tile):
    assert search._tile_rows(rows) == tile


@pytest.mark.usefixtures("small_tiles")
def test_equal_rows_are_ordered_by_index():
    gallery = features(60)
    gallery[[3, 17, 50]] = gallery[42]
    similarity, index = top_k(gallery[[42]], gallery, 6, data_mesh())
    assert index[0, :4].tolist() == [3, 17, 42, 50]
    assert len(set(similarity[0, :4].tolist())) == 1 and similarity[0, 4] < similarity[0, 3]


@pytest.mark.usefixtures("small_tiles")
def test_nan_comes_last():
    query, gallery = features(2), features(20, seed=1)
    gallery[[0, 9]], query[1] = np.nan, np.inf
    similarity, index = top_k(query, gallery, 20, data_mesh())
    others = np.delete(gallery, [0, 9], axis=0)
    np.testing.assert_array_equal(
        index[0, :18], np.delete(np.arange(20), [0, 9])[brute_force(query[:1], others, 18)[1][0]]
    )
    assert index[0, 18:].tolist() == [0, 9] and index[1].tolist() == list(range(20))
    assert np.isnan(similarity).tolist() == [[False] * 18 + [True] * 2, [True] * 20]


def test_memory_does_not_grow_with_the_rows(monkeypatch):
    monkeypatch.setattr(search, "_GALLERY_ROWS", 16)
    mesh, block, count = data_mesh(), 32, 4

    def temporary_bytes(rows):
        gallery, row, tile_rows = search.shard_gallery(mesh, features(rows, 2), np.arange(rows, dtype=np.int32))
        query = replicate(mesh, features(block, 2))
        lowered = search._candidates.lower(query, gallery, row, count=count, mesh=mesh, tile_rows=tile_rows)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary_bytes(1024), temporary_bytes(32768)
    assert few == many < block * 32768 // mesh.size * 4


def test_no_queries():
    similarity, index = top_k(features(0), features(5), 2)
    assert similarity.shape == index.shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, r"k in \[1, 5\]"),
        ({"k": 6}, r"k in \[1, 5\]"),
        ({"query": features(3, 8)}, r"\[Q, D\] and \[G, D\]"),
        ({"gallery": features(0)}, "G >= 1"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"query": features(3), "gallery": features(5), "k": 2} | changes
    with pytest.raises(ValueError, match=message):
        top_k(**arguments, mesh=data_mesh())
