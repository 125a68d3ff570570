"""Recall at k of image-text retrieval, exact for any gallery size and on any number of devices."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from infcl_jax.distributed import is_lead, replicate
from infcl_jax.evaluation.features import l2_normalize, pad_rows, shard_rows

# Cosine similarities closer than this are a tie: float32 rounding of a dot product of unit vectors depends on the
# order of its sum, so equal features would otherwise win or lose against each other by accident.
TIE_TOLERANCE = 1e-6

_QUERY_BLOCK = 2048
_GALLERY_BLOCK = 4096

_logger = logging.getLogger(__name__)


def retrieval_recall(
    image: np.ndarray,
    text: np.ndarray,
    mesh: Mesh,
    ks: Sequence[int] = (1, 5, 10),
    text_image: np.ndarray | None = None,
) -> dict[str, float]:
    """Recall at k in both directions, by cosine similarity.

    A caption finds its image if fewer than k other images are at least as similar to it. An image finds a caption if
    fewer than k captions of other images are at least as similar to it as the best of its own: the protocol of COCO
    and Flickr30k, where each image has five captions and any of them in the first k is a hit (Karpathy & Fei-Fei
    2015, section 4.1; CLIP, arXiv:2103.00020, table 13).

    Ties count against the query (similarities within `TIE_TOLERANCE` are tied, and NaN ties with everything). A model
    whose features have collapsed to a point therefore scores 0 and not 100 %. The price: if two images carry the same
    caption, the two captions tie, so neither image finds its own in first place, and only one of the two captions finds
    its image there. A split with repeated captions thus has a ceiling below 1 at k = 1; drop the repeats, or raise k,
    where that matters. The lead process logs a warning with the ceiling, once per process and gallery. Captions of the
    same image never count against each other.

    No device holds more than a tile of the similarity matrix, its share of the gallery and one block of queries. A k
    that is not smaller than the gallery gives 1 whatever the features are.

    Args:
        image: [N, D] image features, any float dtype, the same on every process; they need not be normalised.
        text: [M, D] caption features, likewise.
        mesh: mesh with an axis "data".
        ks: cut-offs, each >= 1.
        text_image: int [M], the row of `image` each caption belongs to; by default row i belongs to image i (M = N).

    Returns:
        `{"image_to_text_r1": ..., "text_to_image_r1": ..., ...}`, fractions in [0, 1].

    Raises:
        ValueError: shapes that do not fit, a `text_image` outside [0, N), an image without a caption, or a k < 1.
    """
    owner = _check(image, text, ks, text_image)
    image, text = l2_normalize(image), l2_normalize(text)
    positive = paired_similarity(text, image[owner])
    best = np.full(len(image), -np.inf, np.float32)
    with np.errstate(invalid="ignore"):  # NaN wins a maximum, and a NaN threshold counts as a miss
        np.maximum.at(best, owner, positive)
    if is_lead():
        _warn_of_repeats(text, owner)
    own = np.arange(len(image), dtype=np.int32)
    rivals = {
        "image_to_text": count_rivals(image, own, best, text, owner, mesh),
        "text_to_image": count_rivals(text, owner, positive, image, own, mesh),
    }
    return {f"{name}_r{k}": float(np.mean(count < k)) for name, count in rivals.items() for k in ks}


def recall_ceiling(text: np.ndarray, text_image: np.ndarray) -> tuple[int, float, float]:
    """Count captions shared between images and bound recall at 1, where ties are misses.

    An image without an unshared caption cannot find its own first. Of the images that share a caption, at most one is
    found by it.

    Args:
        text: [M, D] caption features; equal captions have features of equal bits.
        text_image: int [M], the image of each caption, in [0, N), every image at least once.

    Returns:
        Number of captions that another image has too, and the upper bounds of image-to-text and text-to-image R@1.
    """
    rows = np.ascontiguousarray(text)
    _, caption = np.unique(rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel(), return_inverse=True)
    pairs, copies = np.unique(np.stack([caption, text_image]), axis=1, return_counts=True)
    images = np.bincount(pairs[0])  # per distinct caption
    shared = images[caption] > 1
    most = np.zeros_like(images)  # copies of one caption that belong to one image
    np.maximum.at(most, pairs[0], copies)
    with_unshared = len(np.unique(text_image[~shared]))
    return int(shared.sum()), with_unshared / len(np.unique(text_image)), float(most.sum() / len(text))


def _warn_of_repeats(text: np.ndarray, text_image: np.ndarray) -> None:
    """Warn if captions of different images have equal features."""
    count, to_text, to_image = recall_ceiling(text, text_image)
    if count:
        _warn_once(
            f"{count} of {len(text)} captions have the features of another image's caption and tie with it: R@1 is at"
            f" most {100 * to_text:.1f} % image to text and {100 * to_image:.1f} % text to image; drop repeated"
            " captions from the gallery for higher ones"
        )


@functools.cache
def _warn_once(message: str) -> None:
    """Log a warning unless the process has logged it before."""
    _logger.warning(message)


def paired_similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row-wise inner products of two [n, D] arrays, summed in float64: float32 [n]."""
    return np.einsum("nd,nd->n", a, b, dtype=np.float64).astype(np.float32)


def count_rivals(
    query: np.ndarray,
    query_group: np.ndarray,
    threshold: np.ndarray,
    gallery: np.ndarray,
    gallery_group: np.ndarray,
    mesh: Mesh,
) -> np.ndarray:
    """How many gallery rows of other groups are at least as similar to each query as its threshold.

    With the similarity of the right answer as threshold, the count is the answer's rank from 0, ties counted against
    it. The gallery is sharded over the mesh; blocks of queries visit all devices and the counts are summed.

    Args:
        query: float32 [Q, D], unit vectors.
        query_group: int [Q]; gallery rows of the same group are not rivals.
        threshold: float32 [Q], a similarity; every row rivals a NaN.
        gallery: float32 [G, D], unit vectors.
        gallery_group: int [G], each >= 0.
        mesh: mesh with an axis "data".

    Returns:
        int32 [Q], the same on every process.
    """
    rows = -(-len(gallery) // mesh.size)
    tiles = -(-rows // _GALLERY_BLOCK)
    tile = -(-rows // tiles)
    sharded = shard_rows(mesh, gallery, multiple=tile)
    sharded_group = shard_rows(mesh, gallery_group.astype(np.int32), fill=-1, multiple=tile)
    block = min(_QUERY_BLOCK, len(query))
    fields = (query, query_group.astype(np.int32), threshold)
    counts = []
    for start in range(0, len(query), block):
        queries = replicate(mesh, tuple(pad_rows(field[start : start + block], block) for field in fields))
        counts.append(np.asarray(_count_block(queries, sharded, sharded_group, mesh=mesh, tile=tile)))
    return np.concatenate(counts)[: len(query)]


@functools.partial(jax.jit, static_argnames=("mesh", "tile"))
def _count_block(
    queries: tuple[jax.Array, jax.Array, jax.Array], gallery: jax.Array, group: jax.Array, *, mesh: Mesh, tile: int
) -> jax.Array:
    """Counts the rivals of one block of queries: [B, D], [B], [B] against the sharded gallery -> int32 [B]."""

    def local(queries: tuple[jax.Array, jax.Array, jax.Array], gallery: jax.Array, group: jax.Array) -> jax.Array:
        query, query_group, threshold = queries

        def count(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            similarity = jnp.einsum("qd,gd->qg", query, block[0], precision=jax.lax.Precision.HIGHEST)
            # "not below" rather than "at least": comparisons with NaN are false, and NaN must count against.
            close = ~(similarity < (threshold - TIE_TOLERANCE)[:, None])
            other = (block[1] >= 0)[None, :] & (block[1][None, :] != query_group[:, None])
            return jnp.sum(close & other, axis=1, dtype=jnp.int32)

        blocks = (gallery.reshape(-1, tile, gallery.shape[1]), group.reshape(-1, tile))
        return jax.lax.psum(jnp.sum(jax.lax.map(count, blocks), axis=0), "data")

    specs = (P(), P("data"), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(queries, gallery, group)


def _check(image: np.ndarray, text: np.ndarray, ks: Sequence[int], text_image: np.ndarray | None) -> np.ndarray:
    """Validates the arguments and returns the image row of every caption, int32 [M]."""
    if image.ndim != 2 or text.ndim != 2 or image.shape[1] != text.shape[1] or 0 in (*image.shape, *text.shape):
        raise ValueError(f"expected features [N, D] and [M, D], none empty, got {image.shape} and {text.shape}")
    if not ks or min(ks) < 1:
        raise ValueError(f"expected cut-offs ks >= 1, got {tuple(ks)}")
    if text_image is None:
        if len(image) != len(text):
            raise ValueError(
                f"expected one caption an image, got {len(image)} images and {len(text)} captions; "
                "pass text_image, the image row of each caption"
            )
        return np.arange(len(text), dtype=np.int32)
    owner = np.asarray(text_image)
    if owner.shape != (len(text),) or not np.issubdtype(owner.dtype, np.integer):
        raise ValueError(f"expected integer text_image of shape ({len(text)},), got {owner.dtype} {owner.shape}")
    if owner.min() < 0 or owner.max() >= len(image):
        raise ValueError(f"expected text_image in [0, {len(image)}), got values in [{owner.min()}, {owner.max()}]")
    bare = np.flatnonzero(np.bincount(owner, minlength=len(image)) == 0)
    if len(bare):
        raise ValueError(f"expected a caption for every image, got none for {len(bare)} (first: row {bare[0]})")
    return owner.astype(np.int32)
