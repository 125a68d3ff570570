"""Exact recall of image-text retrieval and accuracy of zero-shot classification, by ranks on a mesh."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from infcl_jax.evaluation.metrics import accuracies
from infcl_jax.inference.features import l2_normalize, pad_rows
from infcl_jax.inference.search import query_blocks, shard_gallery, tile_similarity
from infcl_jax.runtime.console import warn_once
from infcl_jax.runtime.mesh import replicate
from infcl_jax.runtime.processes import is_lead

# Cosine similarities within this tolerance are ties. The float32 rounding of a dot product depends on the order of
# summation, so without a tolerance it would rank equal features arbitrarily.
TIE_TOLERANCE = 1e-6


def retrieval_recall(
    image: np.ndarray,
    text: np.ndarray,
    mesh: Mesh,
    ks: Sequence[int] = (1, 5, 10),
    text_image: np.ndarray | None = None,
) -> dict[str, float]:
    """Compute recall at k in both directions by cosine similarity.

    Text to image, a caption is a hit if fewer than k other images are at least as similar to it as its own image. Image
    to text, an image is a hit if fewer than k captions of other images are at least as similar to it as its best own
    caption. Captions of the same image never count against each other.

    This is the protocol of COCO and Flickr30k (Karpathy & Fei-Fei 2015, section 4.1; CLIP, arXiv:2103.00020, table 13).
    There, each image has five captions, and any of them in the top k is a hit.

    Ties count as misses: similarities within `TIE_TOLERANCE` are tied, and NaN ties with everything. A model with
    collapsed features therefore scores 0 instead of 100 %. Repeated captions also tie, which bounds recall at 1 below
    100 %. If two images have the same caption, neither image finds its own caption first, and only one of the two
    captions finds its image first. Drop repeated captions or raise k to avoid the bound. The lead process logs a
    warning with the bound, once per process and gallery.

    A device holds its shard of the gallery, up to 2048 queries and one tile of the similarity matrix. A k that is at
    least the size of the gallery always gives 1.

    Examples:
      >>> features = np.eye(20, dtype=np.float32)
      >>> retrieval_recall(features, features, mesh, ks=(1,))
      {'image_to_text_r1': 1.0, 'text_to_image_r1': 1.0}

    Args:
        image: [N, D] image features, any float dtype, the same on every process; need not be normalized.
        text: [M, D] caption features, any float dtype, the same on every process; need not be normalized.
        mesh: mesh with an axis "data".
        ks: cutoffs k, each >= 1.
        text_image: int [M], row of `image` for each caption; None: row i of `text` belongs to row i of `image` (M = N).

    Returns:
        `{"image_to_text_r1": ..., "text_to_image_r1": ..., ...}`, fractions in [0, 1].

    Raises:
        ValueError: the shapes do not match, `text_image` is outside [0, N), an image has no caption, or a k is < 1.
    """
    text_image = _check(image, text, ks, text_image)
    image, text = l2_normalize(image), l2_normalize(text)
    positive = paired_similarity(text, image[text_image])
    best = np.full(len(image), -np.inf, np.float32)  # best positive of each image
    with np.errstate(invalid="ignore"):  # the maximum propagates NaN, and a NaN threshold is a miss
        np.maximum.at(best, text_image, positive)
    if is_lead():
        count, to_text, to_image = recall_ceiling(text, text_image)
        if count:
            warn_once(
                f"{count} of {len(text)} captions have the features of another image's caption and tie with it: R@1 is"
                f" at most {100 * to_text:.1f} % image to text and {100 * to_image:.1f} % text to image; drop repeated"
                " captions from the gallery for higher ones"
            )
    image_row = np.arange(len(image), dtype=np.int32)
    rivals = {
        "image_to_text": count_rivals(image, image_row, best, text, text_image, mesh),
        "text_to_image": count_rivals(text, text_image, positive, image, image_row, mesh),
    }
    return {f"{name}_r{k}": float(np.mean(count < k)) for name, count in rivals.items() for k in ks}


def retrieval_map(
    image: np.ndarray, text: np.ndarray, mesh: Mesh, text_image: np.ndarray | None = None
) -> dict[str, float]:
    """Compute the mean average precision of retrieval in both directions.

    The average precision of a query is the mean of the precision at the ranks of its correct matches (Manning et al.
    2008, Introduction to Information Retrieval, section 8.4). Ties count as misses, as in `retrieval_recall`.

    Examples:
      >>> features = np.eye(20, dtype=np.float32)
      >>> retrieval_map(features, features, mesh)
      {'image_to_text_map': 1.0, 'text_to_image_map': 1.0}

    Args:
        image: [N, D] image features.
        text: [M, D] caption features.
        mesh: mesh with an axis "data".
        text_image: int [M], row of `image` for each caption, see `retrieval_recall`.

    Returns:
        `{"image_to_text_map": ..., "text_to_image_map": ...}`, fractions in (0, 1].

    Raises:
        ValueError: see `retrieval_recall`.
    """
    text_image = _check(image, text, (1,), text_image)
    image, text = l2_normalize(image), l2_normalize(text)
    own = image[text_image]
    positive = paired_similarity(text, own)
    # One query per caption: its image, with the similarity of this caption as the threshold.
    other_texts = count_rivals(own, text_image, positive, text, text_image, mesh)
    image_row = np.arange(len(image), dtype=np.int32)
    other_images = count_rivals(text, text_image, positive, image, image_row, mesh)
    order = np.lexsort((other_texts, text_image))  # captions of each image, best first
    captions = np.bincount(text_image, minlength=len(image))
    own_rank = np.arange(1, len(text) + 1) - np.repeat(np.cumsum(captions) - captions, captions)
    precision = own_rank / (own_rank + other_texts[order])
    per_image = np.bincount(text_image[order], weights=precision) / captions
    return {
        "image_to_text_map": float(np.mean(per_image)),
        "text_to_image_map": float(np.mean(1 / (1 + other_images))),
    }


def zero_shot_accuracy(
    image_features: np.ndarray,
    labels: np.ndarray,
    class_embeddings: np.ndarray,
    mesh: Mesh,
    topk: Sequence[int] = (1, 5),
) -> dict[str, float]:
    """Compute the top-k accuracy of zero-shot classification.

    Classes are ranked by the cosine similarity of their embeddings to the image (CLIP, arXiv:2103.00020, section 3.1).
    The first of tied classes wins, as in `argmax`: similarities within `TIE_TOLERANCE` are tied. Collapsed features
    therefore score the share of the first class, and non-finite features 0. A k that is at least the number of classes
    always gives 1.

    Examples:
      >>> features, classifier = np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)
      >>> zero_shot_accuracy(features, np.array([0, 1, 2, 0]), classifier, mesh, topk=(1,))
      {'top1': 0.75}

    Args:
        image_features: [N, D], any float dtype, the same on every process; need not be normalized.
        labels: int [N], classes in [0, C), or -1 for samples without a class, which are ignored.
        class_embeddings: [C, D], classifier vectors from `class_embeddings`.
        mesh: mesh with an axis "data".
        topk: cutoffs k, each >= 1.

    Returns:
        `{"top1": ..., "top5": ...}`, fractions in [0, 1] of the labeled samples.

    Raises:
        ValueError: the shapes do not match, a label is >= C or < -1, no sample is labeled, or a k is < 1.
    """
    if not topk or min(topk) < 1:
        raise ValueError(f"expected cutoffs topk >= 1, got {tuple(topk)}")
    return accuracies(class_ranks(image_features, labels, class_embeddings, mesh), topk)


def class_ranks(image_features: np.ndarray, labels: np.ndarray, class_embeddings: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Rank the class of each labeled image by cosine similarity, see `zero_shot_accuracy`.

    Returns:
        int32 [labeled images], zero-based ranks: the number of other classes that are more similar to the image, or
        as similar with a lower label.
    """
    image, labels, classes = image_features, np.asarray(labels), class_embeddings
    if image.ndim != 2 or classes.ndim != 2 or image.shape[1] != classes.shape[1] or 0 in classes.shape:
        raise ValueError(f"expected features [N, D] and class embeddings [C, D], got {image.shape} and {classes.shape}")
    if labels.shape != (len(image),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"expected integer labels of shape ({len(image)},), got {labels.dtype} {labels.shape}")
    if not np.any(labels >= 0):
        raise ValueError(f"expected labeled samples, got none among {len(labels)}; use a split that has classes")
    if labels.min() < -1 or labels.max() >= len(classes):
        raise ValueError(
            f"expected labels in [-1, {len(classes)}), got values in [{labels.min()}, {labels.max()}]; "
            "pass the class names of this source"
        )
    label = labels[labels >= 0].astype(np.int32)
    image, classes = l2_normalize(image[labels >= 0]), l2_normalize(classes)
    positive = paired_similarity(image, classes[label])
    rows = np.arange(len(classes), dtype=np.int32)
    return count_rivals(image, label, positive, classes, rows, mesh, first_wins=True)


def recall_ceiling(text: np.ndarray, text_image: np.ndarray) -> tuple[int, float, float]:
    """Count captions shared between images, and bound recall at 1.

    Ties are misses, so an image whose captions are all shared cannot find its own caption first. A caption shared by
    several images finds at most one of them first. Equal captions have bitwise equal features.

    Returns:
        Number of captions shared with another image, and upper bounds of image-to-text and text-to-image R@1.
    """
    rows = np.ascontiguousarray(text)
    _, caption = np.unique(rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel(), return_inverse=True)
    pairs, copies = np.unique(np.stack([caption, text_image]), axis=1, return_counts=True)
    images = np.bincount(pairs[0])  # images per distinct caption
    shared = images[caption] > 1
    max_copies = np.zeros_like(images)  # largest number of copies of a caption that belong to one image
    np.maximum.at(max_copies, pairs[0], copies)
    with_unshared = len(np.unique(text_image[~shared]))  # images with a caption of their own
    return int(shared.sum()), with_unshared / len(np.unique(text_image)), float(max_copies.sum() / len(text))


def paired_similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the row-wise inner products of two [n, D] arrays as float32 [n], accumulated in float64."""
    return np.einsum("nd,nd->n", a, b, dtype=np.float64).astype(np.float32)


def count_rivals(
    query: np.ndarray,
    query_group: np.ndarray,
    threshold: np.ndarray,
    gallery: np.ndarray,
    gallery_group: np.ndarray,
    mesh: Mesh,
    *,
    first_wins: bool = False,
) -> np.ndarray:
    """Count the rivals of each query in the gallery.

    Rivals are gallery rows of other groups whose similarity to the query is at least its threshold.

    If the threshold is the similarity of the correct match, the count is the zero-based rank of the match, with ties as
    misses. With `first_wins`, only ties of lower groups are misses, as with `argmax`. The gallery is sharded over the
    mesh. The queries are replicated, up to 2048 at a time, and the counts of all devices are summed.

    Args:
        query: float32 [Q, D], unit vectors.
        query_group: int [Q]; gallery rows of the same group are not rivals.
        threshold: float32 [Q], similarity threshold; if NaN, all rows of other groups are rivals.
        gallery: float32 [G, D], unit vectors.
        gallery_group: int [G], each >= 0.
        mesh: mesh with an axis "data".
        first_wins: whether the lowest group wins ties.

    Returns:
        int32 [Q], number of rivals of each query, the same on every process.
    """
    sharded, sharded_group, tile_rows = shard_gallery(mesh, gallery, gallery_group.astype(np.int32))
    fields = (query, query_group.astype(np.int32), threshold)
    counts = []
    for rows, size in query_blocks(len(query)):
        queries = replicate(mesh, tuple(pad_rows(field[rows], size) for field in fields))
        count = _count_replicated(
            queries, sharded, sharded_group, mesh=mesh, tile_rows=tile_rows, first_wins=first_wins
        )
        counts.append(np.asarray(count))
    return np.concatenate(counts)[: len(query)]


@functools.partial(jax.jit, static_argnames=("mesh", "tile_rows", "first_wins"))
def _count_replicated(
    queries: tuple[jax.Array, jax.Array, jax.Array],
    gallery: jax.Array,
    group: jax.Array,
    *,
    mesh: Mesh,
    tile_rows: int,
    first_wins: bool,
) -> jax.Array:
    """Count the rivals of replicated queries in a gallery sharded in tiles, whose padding has the group -1."""

    def local(queries: tuple[jax.Array, jax.Array, jax.Array], gallery: jax.Array, group: jax.Array) -> jax.Array:
        query, query_group, threshold = queries

        def count(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
            tile_gallery, tile_group = tile
            similarity = tile_similarity(query, tile_gallery)
            # ~(a < b) instead of a >= b: comparisons with NaN are false, and NaN must count as a rival.
            later = first_wins & (tile_group[None, :] > query_group[:, None])
            rival = ~(similarity < threshold[:, None] + jnp.where(later, TIE_TOLERANCE, -TIE_TOLERANCE))
            other_group = (tile_group >= 0)[None, :] & (tile_group[None, :] != query_group[:, None])
            return jnp.sum(rival & other_group, axis=1, dtype=jnp.int32)

        tiles = (gallery.reshape(-1, tile_rows, gallery.shape[1]), group.reshape(-1, tile_rows))
        return jax.lax.psum(jnp.sum(jax.lax.map(count, tiles), axis=0), "data")

    specs = (P(), P("data"), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(queries, gallery, group)


def _check(image: np.ndarray, text: np.ndarray, ks: Sequence[int], text_image: np.ndarray | None) -> np.ndarray:
    """Validate the arguments and return `text_image` as int32 [M]."""
    if image.ndim != 2 or text.ndim != 2 or image.shape[1] != text.shape[1] or 0 in (*image.shape, *text.shape):
        raise ValueError(f"expected features [N, D] and [M, D], none empty, got {image.shape} and {text.shape}")
    if not ks or min(ks) < 1:
        raise ValueError(f"expected cutoffs ks >= 1, got {tuple(ks)}")
    if text_image is None:
        if len(image) != len(text):
            raise ValueError(
                f"expected one caption per image, got {len(image)} images and {len(text)} captions; "
                "pass text_image, the image row of each caption"
            )
        return np.arange(len(text), dtype=np.int32)
    text_image = np.asarray(text_image)
    if text_image.shape != (len(text),) or not np.issubdtype(text_image.dtype, np.integer):
        raise ValueError(
            f"expected integer text_image of shape ({len(text)},), got {text_image.dtype} {text_image.shape}"
        )
    if text_image.min() < 0 or text_image.max() >= len(image):
        raise ValueError(
            f"expected text_image in [0, {len(image)}), got values in [{text_image.min()}, {text_image.max()}]"
        )
    without_caption = np.flatnonzero(np.bincount(text_image, minlength=len(image)) == 0)
    if len(without_caption):
        raise ValueError(
            f"expected a caption for every image, got none for {len(without_caption)} (first: row {without_caption[0]})"
        )
    return text_image.astype(np.int32)
