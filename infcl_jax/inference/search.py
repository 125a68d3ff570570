"""Exact nearest neighbors by cosine similarity, tile by tile on a mesh."""

import collections
import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from infcl_jax.inference.features import l2_normalize, pad_rows, shard_rows
from infcl_jax.runtime.mesh import data_mesh, replicate

# Maximum rows and columns of a tile of the similarity matrix: 2048 x 4096 in float32 are 32 MiB on each device.
_QUERY_ROWS = 2048
_GALLERY_ROWS = 4096
# Candidates per query besides the k results. Their float64 similarities decide the order, so the float32 rounding of a
# tile does not. With k = 10 there are 16 candidates, the most for which XLA's top-k on GPUs needs no full sort.
_MARGIN = 6
_RESCORED_ROWS = 256  # queries rescored at once, which bounds their candidates in host memory
_RESCORING = 4  # threads that rescore blocks of queries while the devices search the next ones
# Gallery rows of a tile that is searched by groups, and the number of its groups.
_TILE_ROWS = (65_536, 32_768, 16_384, 8_192)
_GROUPS = 1024
_PADDED_SHARE = 4  # tiles may pad a device's rows by a quarter

_NAN, _PADDING = -2.0, -3.0  # below every cosine similarity


def top_k(query: np.ndarray, gallery: np.ndarray, k: int, mesh: Mesh | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Find the k nearest gallery rows of each query by cosine similarity.

    The search is exact: every query is compared with every gallery row in float32, and the best candidates again in
    float64. Equal similarities are ordered by index. NaN similarities come last. Rows whose similarities differ by less
    than float32 rounding (1e-6) are ordered exactly, unless more than 6 of them tie with the k-th result.

    Memory is linear in the rows. A device holds its shard of the gallery, up to 2048 queries and one tile of the
    similarity matrix, of at most 65,536 gallery rows (512 MiB).

    Args:
        query: [Q, D], any float dtype, the same on every process; need not be normalized.
        gallery: [G, D], any float dtype, the same on every process; need not be normalized.
        k: number of neighbors, in [1, G].
        mesh: mesh with an axis "data"; None: all devices.

    Returns:
        Similarities float32 [Q, k] in descending order, and gallery rows int32 [Q, k], on every process.

    Raises:
        ValueError: the shapes do not match, or k is out of range.

    Examples:
      >>> similarity, index = top_k(np.asarray(text), np.asarray(image), 3)
      >>> index.shape, bool(similarity[0, 0] >= similarity[0, 1])
      ((8, 3), True)
    """
    if query.ndim != 2 or gallery.ndim != 2 or query.shape[1] != gallery.shape[1] or 0 in gallery.shape:
        raise ValueError(f"expected features [Q, D] and [G, D], G >= 1, got {query.shape} and {gallery.shape}")
    if not 1 <= k <= len(gallery):
        raise ValueError(f"expected k in [1, {len(gallery)}], the rows of the gallery, got {k}")
    mesh = data_mesh() if mesh is None else mesh
    similarity, index = np.zeros((len(query), k), np.float32), np.zeros((len(query), k), np.int32)
    unit = l2_normalize(gallery)
    rows_of_device = -(-len(unit) // mesh.size)
    sharded, row, tile_rows = shard_gallery(
        mesh, unit, np.arange(len(unit), dtype=np.int32), tile_rows=_tile_rows(rows_of_device)
    )
    candidates = min(k + _MARGIN, len(unit))

    def rescore(rows: slice, queries: np.ndarray, best: jax.Array) -> None:
        similarity[rows], index[rows] = _rescore(queries, unit, np.asarray(best)[: len(queries)], k)

    with ThreadPoolExecutor(_RESCORING) as threads:
        running: collections.deque[Future] = collections.deque()
        for rows, block in query_blocks(len(query)):
            queries = l2_normalize(query[rows])
            padded = replicate(mesh, pad_rows(queries, block))
            best = _candidates(padded, sharded, row, count=candidates, mesh=mesh, tile_rows=tile_rows)
            if jax.default_backend() == "cpu":
                best.block_until_ready()  # queued collectives of simulated devices can deadlock
            running.append(threads.submit(rescore, rows, queries, best))
            if len(running) > _RESCORING:
                running.popleft().result()
        for last in running:
            last.result()
    return similarity, index


def shard_gallery(
    mesh: Mesh, gallery: np.ndarray, number: np.ndarray, tile_rows: int | None = None
) -> tuple[jax.Array, jax.Array, int]:
    """Shard a gallery [G, D], the same on every process, in equal tiles.

    Args:
        number: int32 [G], a number >= 0 of each row.
        tile_rows: rows of a tile; None: at most 4096, chosen to pad little of the last tile.

    Returns:
        Gallery and numbers, padded with zeros and -1 and sharded over "data", and the rows of a tile, which divide the
        rows of every device.
    """
    if tile_rows is None:
        block_rows = -(-len(gallery) // mesh.size)
        tiles = -(-block_rows // _GALLERY_ROWS)
        tile_rows = -(-block_rows // tiles)
    sharded = shard_rows(mesh, gallery, multiple=tile_rows)
    return sharded, shard_rows(mesh, number, fill=-1, multiple=tile_rows), tile_rows


def query_blocks(count: int, block_rows: int | None = None) -> Iterator[tuple[slice, int]]:
    """Split queries into blocks of at most 2048 rows.

    Yields:
        Rows of a block, and the number of rows to which it is padded, the same for all.
    """
    size = min(block_rows or _QUERY_ROWS, count)
    for start in range(0, count, max(size, 1)):
        yield slice(start, start + size), size


def tile_similarity(query: jax.Array, tile: jax.Array) -> jax.Array:
    """Compute the similarities [Q, G] of queries [Q, D] and a tile of the gallery [G, D] with float32 accuracy."""
    return jnp.einsum("qd,gd->qg", query, tile, precision=jax.lax.Precision.HIGHEST)


def _tile_rows(rows: int) -> int | None:
    """Return the rows of a tile that is searched by groups; None if tiles would pad a device's rows by too much."""
    return next((tile for tile in _TILE_ROWS if -rows % tile <= rows // _PADDED_SHARE), None)


def _rescore(query: np.ndarray, gallery: np.ndarray, index: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Select the k best candidates of each query by float64 similarity, then by index."""
    similarity = np.concatenate(
        [
            np.einsum("qd,qcd->qc", query[rows], gallery[index[rows]], dtype=np.float64)
            for rows, _ in query_blocks(len(query), _RESCORED_ROWS)
        ]
    )
    order = np.lexsort((index, -similarity))[:, :k]  # NaN comes last
    best = np.take_along_axis(similarity, order, axis=1).astype(np.float32)
    return best, np.take_along_axis(index, order, axis=1)


@functools.partial(jax.jit, static_argnames=("count", "mesh", "tile_rows"))
def _candidates(
    query: jax.Array, gallery: jax.Array, row: jax.Array, *, count: int, mesh: Mesh, tile_rows: int
) -> jax.Array:
    """Find the best gallery rows of replicated queries in a gallery sharded over "data".

    Args:
        row: int32 [G], row of the whole gallery, -1 for padding; sharded as the gallery.
        tile_rows: gallery rows per tile of the similarity matrix; divides the rows of every device.

    Returns:
        int32 [Q, count], in descending order of the float32 similarity, then by row; replicated.
    """

    def local(query: jax.Array, gallery: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        def merge(best: tuple[jax.Array, jax.Array], tile: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
            tile_gallery, tile_row = tile
            similarity = tile_similarity(query, tile_gallery)
            score = jnp.where(jnp.isnan(similarity), _NAN, similarity)
            score = jnp.where((tile_row >= 0)[None, :], score, _PADDING)
            tile_best = _best_of_tile(score, tile_row, count)
            # Earlier rows first, because top_k keeps the order of equal scores.
            joined = [jnp.concatenate(pair, axis=1) for pair in zip(best, tile_best, strict=True)]
            return _best(joined[0], joined[1], count), None

        empty = jnp.full((len(query), count), _PADDING), jnp.full((len(query), count), -1, jnp.int32)
        start = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), empty)
        tiles = gallery.reshape(-1, tile_rows, gallery.shape[1]), row.reshape(-1, tile_rows)
        best, _ = jax.lax.scan(merge, start, tiles)
        return best

    specs = (P(), P("data"), P("data"))
    shards = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "data"))(query, gallery, row)
    score, row = jax.lax.with_sharding_constraint(shards, NamedSharding(mesh, P()))
    return _best(score, row, count)[1]


def _best_of_tile(score: jax.Array, row: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Select the largest scores [Q, T] of a tile and their rows [T]; equal scores keep their order.

    The columns form groups. The `count` groups with the largest maxima contain the result: every other group has only
    scores that come after one score of each of these. So only the maxima of all groups and the scores of few groups are
    sorted.
    """
    queries, columns = score.shape
    size = columns // _GROUPS
    if columns % _GROUPS or 2 * count * size > columns:
        return _best(score, jnp.broadcast_to(row[None, :], score.shape), count)
    grouped = score.reshape(queries, _GROUPS, size)
    _, group = jax.lax.top_k(grouped.max(axis=2), count)
    group = jnp.sort(group, axis=1)  # the order of the columns
    scores = jnp.take_along_axis(grouped, group[:, :, None], axis=1).reshape(queries, -1)
    rows = row.reshape(_GROUPS, size)[group].reshape(queries, -1)
    padding = ((0, 0), (0, max(0, _GROUPS - count * size)))
    padded = jnp.pad(scores, padding, constant_values=_PADDING), jnp.pad(rows, padding, constant_values=-1)
    return _best(*padded, count)


def _best(score: jax.Array, row: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Select the largest scores and their rows; equal scores keep their order."""
    best, position = jax.lax.top_k(score, min(count, score.shape[1]))
    return best, jnp.take_along_axis(row, position, axis=1)
