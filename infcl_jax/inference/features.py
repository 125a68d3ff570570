"""Features of the images and captions of a whole split, encoded on a mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from infcl_jax.inference.text_batches import agreed_batches, text_batches
from infcl_jax.losses.matryoshka import prefix
from infcl_jax.models.text_pair import text_tower
from infcl_jax.ops.packing import PackedTokens
from infcl_jax.runtime.mesh import shard_batch, to_host

Encode = Callable[[Any, Any], jax.Array]
Batch = Mapping[str, np.ndarray]

_IMAGE_KEYS = ("image", "label", "index", "mask")
_TEXT_KEYS = ("text", "text_index")


@dataclasses.dataclass(frozen=True)
class TowerEncoder:
    """Encoder of one tower of a model.

    Equal models have equal encoders, so they share the programs of `encode_sharded`.

    Attributes:
        model: a `CLIP` or `TextPair` module.
        method: method of the model, such as "encode_text".
        dim: size of the normalized prefix of the features; None: the whole features.
    """

    model: nn.Module
    method: str
    dim: int | None = None

    def __call__(self, variables: Any, inputs: jax.Array | PackedTokens) -> jax.Array:
        """Encode a batch to [b, D], given the Flax variables of the model."""
        features = cast(jax.Array, self.model.apply(variables, inputs, method=self.method))
        return features if self.dim is None else prefix(features, self.dim)

    @property
    def packable_tower(self) -> Any:
        """Text tower that can encode packed texts; None if it may attend to padding."""
        tower = text_tower(self.model, self.method.removeprefix("encode_"))
        return None if getattr(tower, "attends_to_padding", True) else tower


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """Features of the N images and M captions of a split, in host memory.

    Row i of `image`, `label` and `index` belongs to the same image.

    Examples:
      >>> captions = np.arange(8, dtype=np.int32)  # one caption for each image
      >>> features = Features(np.asarray(image), np.asarray(text), captions, label=np.full(8, -1), index=np.arange(8))
      >>> recall = retrieval_recall(features.image, features.text, mesh, text_image=features.text_image)

    Attributes:
        image: float32 [N, D], image features.
        text: float32 [M, D], caption features, ordered by image; M = 0 if only images were encoded.
        text_image: int32 [M], row of `image` for each caption, ascending.
        label: int32 [N], class of the image, -1 without class.
        index: int64 [N], index of the image in its source, ascending.
    """

    image: np.ndarray
    text: np.ndarray
    text_image: np.ndarray
    label: np.ndarray
    index: np.ndarray

    def __len__(self) -> int:
        """Number of images N."""
        return len(self.index)

    def prefix(self, dim: int) -> "Features":
        """Cut the features to their first `dim` columns, L2-normalized."""
        image, text = l2_normalize(self.image[:, :dim]), l2_normalize(self.text[:, :dim])
        return dataclasses.replace(self, image=image, text=text)

    @property
    def first_text(self) -> np.ndarray:
        """Features of the first caption of each image, float32 [N, D]."""
        return self.text[np.searchsorted(self.text_image, np.arange(len(self)))]


def encode_split(
    encode_image: Encode, encode_text: Encode | None, params: Any, batches: Iterable[Batch], mesh: Mesh
) -> Features:
    """Encode all images and captions of a split on a mesh.

    Encoders are compiled once per function object and batch shape, so pass the same two functions at every evaluation
    of a run. Every process must call this function with the same number of batches with the same number of images. A
    batch that does not fill the devices, or is shorter than an earlier batch, is padded. The result contains no
    padding.

    Captions are a stream of their own, encoded after the images in batches of the same number of rows, because images
    have different numbers of captions. Until then, their tokens stay in host memory. Equal captions have equal
    features.

    Examples:
      >>> source, tokenizer = load_source("photos", "train"), load_tokenizer("bytes", 36)
      >>> batches = eval_batches(source, tokenizer=tokenizer, image_size=16, batch_size=8)
      >>> def encode_image(variables, pixels):
      ...     return model.apply(variables, pixels, method="encode_image")
      >>> features = encode_split(encode_image, None, variables, batches, mesh)
      >>> features.image.shape
      (8, 16)

    Args:
        encode_image: `encode_image(params, image [b, H, W, 3]) -> [b, D]`, any float dtype.
        encode_text: `encode_text(params, text [b, L]) -> [b, D]`, any float dtype; None: encode images only.
        params: parameters of the encoders, on `mesh` (see `infcl_jax.distributed.replicate`).
        batches: process-local batches of `eval_batches`: `image` uint8 [b, H, W, 3], `label` int32 [b], `index` int64
            [b] and `mask` bool [b], False for padding; with `encode_text`, also `text` int32 [c, L] and `text_index`
            int64 [c], the index of each caption's image.
        mesh: mesh with an axis "data", over which the batch is sharded.

    Returns:
        Features of the rows with a true mask, on every process. They are sorted by `index`, so the order does not
        depend on the number of processes.

    Raises:
        ValueError: there is no batch, no row with a true mask, a missing field, fields of different lengths, an image
            without caption, or an encoder with an output that is not [b, D].
    """
    rows = 0
    captions: list[Batch] = []

    def image_batches() -> Iterator[Batch]:
        nonlocal rows
        for batch in batches:
            rows = max(rows, _padded_rows(batch, mesh))
            if encode_text is not None:
                _check_fields(batch, _TEXT_KEYS)
                captions.append({key: batch[key] for key in _TEXT_KEYS})
            yield batch

    image = _sorted(encode_image_batches(encode_image, params, image_batches(), mesh))
    if image is None:
        raise ValueError("expected at least one evaluation batch, got none; check the split and the batch size")
    if len(image["index"]) == 0:
        raise ValueError("expected at least one sample in the split, got only padding (every mask is False)")
    if encode_text is None:
        text, text_image = np.zeros((0, image["feature"].shape[1]), np.float32), np.zeros(0, np.int32)
    else:
        joined = {key: np.concatenate([batch[key] for batch in captions]) for key in _TEXT_KEYS}
        sorted_captions = _sorted(encode_caption_rows(encode_text, params, joined, mesh, rows))
        own = np.zeros(0, np.int64) if sorted_captions is None else sorted_captions["index"]
        missing, unknown = np.setdiff1d(image["index"], own), np.setdiff1d(own, image["index"])
        if sorted_captions is None or len(missing) or len(unknown):
            raise ValueError(
                f"expected captions of every image and of no others, got none for {len(missing)} of "
                f"{len(image['index'])} images and those of {len(unknown)} others; use eval_batches"
            )
        text = sorted_captions["feature"][_first_equal(sorted_captions["text"])]
        text_image = np.searchsorted(image["index"], own).astype(np.int32)
    return Features(image["feature"], text, text_image, image["label"], image["index"])


def encode_image_batches(
    encode_image: Encode, params: Any, batches: Iterable[Batch], mesh: Mesh
) -> Iterator[dict[str, np.ndarray]]:
    """Encode batches of images, one batch ahead of the host; for arguments and errors see `encode_split`.

    Yields:
        `feature` float32 [m, D], `label` int32 [m] and `index` int64 [m] of the m rows of a global batch that have a
        true mask, on every process.
    """

    def encoded() -> Iterator[dict[str, jax.Array]]:
        rows = 0
        for batch in batches:
            rows = max(rows, _padded_rows(batch, mesh))
            label, mask = np.asarray(batch["label"], np.int32), np.asarray(batch["mask"], np.bool_)
            fields = {"image": np.asarray(batch["image"]), "label": label, "index": batch["index"], "mask": mask}
            device = _shard({key: pad_rows(value, rows) for key, value in fields.items()}, mesh)
            yield {"feature": encode_sharded(encode_image, mesh, params, device.pop("image")), **device}

    yield from _collected(encoded())


def encode_caption_rows(
    encode_text: Encode, params: Any, captions: Batch, mesh: Mesh, rows: int
) -> Iterator[dict[str, np.ndarray]]:
    """Encode the captions of all processes, one batch ahead of the host; for arguments see `encode_split`.

    Captions are packed if the encoder is a `TowerEncoder` that allows it and that saves batches.

    Args:
        captions: `text` int32 [c, L] and `text_index` int64 [c] of this process; c may differ between processes.
        rows: padded captions of each process encoded at once, a multiple of its devices.

    Yields:
        `feature` float32 [m, D], `index` int64 [m] and `text` int32 [m, L] of m captions, on every process.
    """

    tower, devices = getattr(encode_text, "packable_tower", None), len(mesh.local_devices)

    def encoded() -> Iterator[dict[str, jax.Array]]:
        start = 0
        for inputs, is_text in agreed_batches(tower, captions["text"], rows, devices):
            stop = start + int(is_text.sum())
            index = np.full(len(is_text), -1, np.int64)
            index[is_text] = captions["text_index"][start:stop]
            start = stop
            device = _shard({"text": inputs, "index": index, "mask": is_text}, mesh)
            text = device.pop("text")
            feature = encode_sharded(encode_text, mesh, params, text)
            yield {"feature": feature, "text": text.tokens if isinstance(text, PackedTokens) else text, **device}

    yield from _collected(encoded())


def encode_texts(
    encode_text: Encode,
    params: Any,
    tokenize: Callable[[Sequence[str]], np.ndarray],
    texts: Sequence[str],
    mesh: Mesh,
    batch_size: int,
) -> np.ndarray:
    """Encode N >= 1 texts, the same on every process.

    Texts are packed if the encoder is a `TowerEncoder` that allows it and that saves tokens. Equal texts have equal
    features.

    Args:
        tokenize: function from n texts to int32 [n, L].
        batch_size: padded texts encoded at once, over all devices; rounded up to a multiple of the mesh size.

    Returns:
        float32 [N, D], on every process.
    """
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    tower, rows = getattr(encode_text, "packable_tower", None), padded_size(len(number), batch_size, mesh.size)
    tokens = (tokenize(list(batch)) for batch in itertools.batched(number, rows))

    def encoded() -> Iterator[dict[str, jax.Array]]:
        # Texts are tokenized while the devices encode the previous ones.
        for inputs, is_text in text_batches(tower, tokens, rows, mesh.size):
            device, mask = jax.tree.map(functools.partial(shard_rows, mesh), (inputs, is_text))
            yield {"feature": encode_sharded(encode_text, mesh, params, device), "mask": mask}

    features = np.concatenate([batch["feature"] for batch in _without_padding(encoded())])
    return features[[number[text] for text in texts]]


def check_sequence(name: str, values: Any) -> None:
    """Check that inputs are a list and not a single one."""
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise ValueError(f"expected {name} to be a list, got {type(values).__name__}; put a single one in a list")


def padded_size(count: int, batch_size: int, multiple: int) -> int:
    """Return the rows of the batches of `count` inputs, a multiple of the mesh size.

    Fewer inputs than a batch are padded to a power of two, so that calls with few inputs are cheap and their programs
    are few.
    """
    rows = min(batch_size, 1 << (count - 1).bit_length())
    return -(-rows // multiple) * multiple


@functools.partial(jax.jit, static_argnums=(0, 1))
def encode_sharded(encode: Encode, mesh: Mesh, params: Any, inputs: jax.Array | PackedTokens) -> jax.Array:
    """Encode inputs [b, ...], sharded over the axis "data" of `mesh`, as float32 [b, D] with the same sharding.

    Raises:
        ValueError: the output of the encoder is not [b, D].
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells the ops how rows are sharded
        features = encode(jax.lax.with_sharding_constraint(params, NamedSharding(mesh, P())), inputs)
    shape = jax.tree.leaves(inputs)[0].shape
    if features.ndim != 2 or features.shape[0] != shape[0]:
        raise ValueError(
            f"expected an encoder that maps {shape} to [{shape[0]}, D], got an output of shape "
            f"{features.shape}; pool and project the features inside the encoder"
        )
    return jax.lax.with_sharding_constraint(features.astype(jnp.float32), NamedSharding(mesh, P("data")))


def shard_rows(mesh: Mesh, array: np.ndarray, *, fill: float = 0, multiple: int = 1) -> jax.Array:
    """Pad the rows of a host array, the same on every process, and shard them over "data".

    The rows on each device become a multiple of `multiple`.
    """
    padded = pad_rows(array, -(-len(array) // (mesh.size * multiple)) * mesh.size * multiple, fill=fill)
    return jax.make_array_from_callback(padded.shape, NamedSharding(mesh, P("data")), lambda block: padded[block])


def pad_rows(array: np.ndarray, rows: int, *, fill: float = 0) -> np.ndarray:
    """Pad an array along its first axis; return itself if it has that number of rows."""
    if len(array) == rows:
        return array
    tail = np.full((rows - len(array), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, tail])


def l2_normalize(features: np.ndarray) -> np.ndarray:
    """Normalize vectors along the last axis to unit length, as float32.

    Zero vectors stay zero. Infinite entries become NaN.
    """
    wide = np.asarray(features, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        norm = np.linalg.norm(wide, axis=-1, keepdims=True)
        return (wide / np.where(norm == 0, 1.0, norm)).astype(np.float32)


def _padded_rows(batch: Batch, mesh: Mesh) -> int:
    """Validate the images of a batch and return their padded number.

    The padded number is a multiple of the number of local devices.
    """
    _check_fields(batch, _IMAGE_KEYS)
    devices = len(mesh.local_devices)
    return -(-len(batch["mask"]) // devices) * devices


def _check_fields(batch: Batch, keys: Sequence[str]) -> None:
    """Check that a batch has the fields, all of one length."""
    missing = [key for key in keys if key not in batch]
    if missing:
        raise ValueError(f"expected evaluation batches with {keys}, got one without {missing}; use eval_batches")
    lengths = {key: len(batch[key]) for key in keys}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"expected one length for the fields of an evaluation batch, got {lengths}")


def _shard(fields: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Shard the fields of this process's rows; the index becomes int32 words."""
    # JAX without x64 truncates int64 to int32. Two 32-bit words per row represent any index exactly.
    words = np.ascontiguousarray(fields["index"], np.int64).view(np.int32).reshape(-1, 2)
    return cast(dict[str, Any], shard_batch(mesh, fields | {"index": words}))


def _on_host[T](batches: Iterable[T]) -> Iterator[Any]:
    """Gather batches on every host, one batch late.

    Collecting the previous batch overlaps host copies and the input pipeline with device computation.
    """
    pending: list[T] = []
    for batch in batches:
        yield from map(to_host, pending)
        pending = [batch]
    yield from map(to_host, pending)


def _without_padding(batches: Iterable[dict[str, jax.Array]]) -> Iterator[dict[str, np.ndarray]]:
    """Gather batches on every host, without the rows of a false mask."""
    for host in _on_host(batches):
        keep = np.asarray(host.pop("mask"))
        yield {key: value[keep] for key, value in host.items()}


def _collected(batches: Iterable[dict[str, jax.Array]]) -> Iterator[dict[str, np.ndarray]]:
    """Gather batches without their padding, with int64 indices."""
    for batch in _without_padding(batches):
        yield batch | {"index": np.ascontiguousarray(batch["index"]).view(np.int64).reshape(-1)}


def _sorted(batches: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """Concatenate batches and sort their rows by index; None without batches."""
    host = list(batches)
    if not host:
        return None
    fields = {key: np.concatenate([batch[key] for batch in host]) for key in host[0]}
    order = np.argsort(fields["index"], kind="stable")  # captions of an image keep their order
    return {key: value[order] for key, value in fields.items()}


def _first_equal(text: np.ndarray) -> list[int]:
    """Return the first row of the same token ids for each row.

    The features of a packed text depend on its place by rounding, but equal captions must tie.
    """
    first: dict[bytes, int] = {}
    return [first.setdefault(ids.tobytes(), row) for row, ids in enumerate(text)]
