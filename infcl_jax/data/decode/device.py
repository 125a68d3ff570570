"""Decoding of whole batches on the devices.

Reading threads and workers pack encoded images and their crop boxes. This stage decodes them on the devices, ahead of
training. The host decodes the images that a device refuses or does not support.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Bool, Float, Int, UInt8

from infcl_jax.data.decode.pillow import MAX_PIXELS, open_image, orientation_of
from infcl_jax.data.iterator import ENCODED, concatenate
from infcl_jax.data.transforms import Box, Geometry

MAX_DEVICE_PIXELS = 2**24  # 48 MiB; the host decodes larger images, at a reduced size
STAGED_BATCHES = 2  # decoded batches whose last program may wait for the device

_END_OF_IMAGE = b"\xff\xd9"  # last marker of a JPEG
_HOST_THREADS = 4  # decode refused images
_ON_HOST = Geometry(Box(0, 0, 0, 0))  # of pixels that the host has decoded

# Entries of a batch with one row for each image, and entries of a packed batch that the stage consumes.
_ROWS = ("image", "text", "index", "color", "ids")
_REPLACED = ("text", "index", "ids")  # of the sample that replaces a bad one
_PACKED = (ENCODED, "length", "box", "shift", "flip", "row")


class DeviceDecoder(Protocol):
    """Decoder of one device."""

    def __call__(
        self, encoded: Sequence[np.ndarray], boxes: Float[np.ndarray, "b 4"], size: int
    ) -> tuple[Callable[[], UInt8[jax.Array, "b s s 3"]], list[int]]:
        """Decode images, crop their boxes and resize these (bicubic, antialiased).

        The device may still resize the last ones while it decodes the next call's.

        Args:
          encoded: contents of the image files, uint8 arrays; empty for images to skip.
          boxes: (top, left, height, width) of each crop box, in pixels.
          size: side S of the results, in pixels.

        Returns:
          A function that waits for the images on the device and returns them, and the rows that are not decoded, in
          order. Their pixels are undefined.
        """
        ...


class EncodedImage(NamedTuple):
    """Contents of a JPEG file that a device can decode, with its crop box, shift and flip."""

    data: bytes
    geometry: Geometry


def encoded_image(
    data: bytes, draw: Callable[[int, int], Geometry], max_pixels: int = MAX_PIXELS
) -> EncodedImage | None:
    """Read the header of an image file that a device can decode.

    Devices decode complete, upright JPEGs with one or three channels, up to `MAX_DEVICE_PIXELS`. Arguments and
    exceptions are as in `pillow.decode_crop`.

    Returns:
      The file with its geometry; None if the host must decode it.
    """
    with open_image(data, max_pixels) as file:
        width, height = file.size
        # Decoders of devices may accept truncated files, which the host refuses.
        complete = data[-64:].rstrip(b"\0\r\n").endswith(_END_OF_IMAGE)
        if file.format != "JPEG" or file.mode not in ("L", "RGB") or not complete:
            return None
        if width * height > MAX_DEVICE_PIXELS or orientation_of(file) != 1:
            return None
        return EncodedImage(data, draw(height, width))


def pack(rows: Sequence[int], images: Sequence[EncodedImage | np.ndarray]) -> dict[str, np.ndarray]:
    """Pack images of global rows into arrays that can be concatenated.

    An image is one for the device, or pixels uint8 [S, S, 3] that the host has decoded, whose box is empty.
    """
    data = [np.frombuffer(i.data, np.uint8) if isinstance(i, EncodedImage) else i.reshape(-1) for i in images]
    geometries = [i.geometry if isinstance(i, EncodedImage) else _ON_HOST for i in images]
    return {
        ENCODED: np.concatenate(data),
        "length": np.array([array.size for array in data], np.int64),
        "box": np.array([geometry.box for geometry in geometries], np.float32),
        "shift": np.array([geometry.shift for geometry in geometries], np.int32),
        "flip": np.array([geometry.flip for geometry in geometries], bool),
        "row": np.array(rows, np.int64),
    }


@dataclasses.dataclass(frozen=True)
class _DecodedImages:
    """Decoded images of a batch on the devices of this process, before shifts, flips and replacements."""

    images: list[Callable[[], jax.Array]]  # wait for the images of each device, in memory of its decoder
    changes: Sequence[tuple[np.ndarray, ...]]  # other arguments of `_finish` for each device
    rows: int  # of the batch over all processes


class DeviceStage:
    """Decode packed batches on the devices of this process, ahead of training.

    Args:
      decoders: decoder of each device, by device.
      sharding: sharding of the batch's rows.
      host_rows: function that decodes (global row, sample index) pairs on the host to a batch with "image", "text" and
        "index". It replaces bad records.
      size: side S of the images, in pixels.
    """

    def __init__(
        self,
        decoders: Mapping[jax.Device, DeviceDecoder],
        sharding: NamedSharding,
        host_rows: Callable[[Sequence[tuple[int, int]]], dict[str, np.ndarray]],
        size: int,
    ) -> None:
        self._decoders, self._sharding, self._host_rows, self._size = decoders, sharding, host_rows, size
        self._threads = concurrent.futures.ThreadPoolExecutor(len(decoders), "decode-device")
        self._host_threads = concurrent.futures.ThreadPoolExecutor(_HOST_THREADS, "decode-host")
        # Arrays of the decoders with the programs that read them. The memory of the decoders is not JAX's, so they
        # must stay until the programs have run.
        self._staged: collections.deque[tuple[list[jax.Array], Any]] = collections.deque()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Decode a batch of concatenated arrays of `pack`, "text" [b, ...] and "index" [b] of this process.

        Returns:
          The batch with "image" for `complete` instead of the packed arrays. Replaced records have another "text" and
          "index".
        """
        result = {key: np.copy(array) if key in _REPLACED else array for key, array in batch.items()}
        packed: dict[str, Any] = {key: result.pop(key) for key in _PACKED}
        data = _files(packed[ENCODED], packed["length"])
        pixels: dict[int, np.ndarray] = {}  # decoded by the host, by row
        for row in np.flatnonzero(packed["box"][:, 2] == 0).tolist():
            pixels[row] = data[row].reshape(self._size, self._size, 3)
            data[row] = data[row][:0]
        blocks = self._blocks(len(data))
        decoded = list(self._threads.map(lambda block: self._decode(block, data, packed["box"]), blocks))
        refused = sorted(row for _, rows in decoded for row in rows if row not in pixels)
        pairs = [[(int(packed["row"][row]), int(result["index"][row]))] for row in refused]
        chunks = list(self._host_threads.map(self._host_rows, pairs))
        for row, chunk in zip(refused, chunks, strict=True):
            pixels[row] = chunk["image"][0]
            for name in result.keys() & set(_REPLACED):
                result[name][row] = chunk[name][0]
        # Entries that are not rows, such as lists of bad records.
        result |= concatenate([{k: v for k, v in c.items() if k not in _ROWS} for c in (result, *chunks)])
        changes = [
            (packed["shift"][rows], packed["flip"][rows], *_replacements(pixels, rows, self._size))
            for _, rows in blocks
        ]
        batch_rows = len(data) * len(self._sharding.device_set) // len(blocks)
        return result | {"image": _DecodedImages([images for images, _ in decoded], changes, batch_rows)}

    def complete(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Shift, mirror and replace images; "image" becomes uint8 [B, S, S, 3] over the devices of all processes.

        It allocates memory of JAX. Between the steps, small arrays do not split the memory that the next step needs in
        one piece.
        """
        decoded: _DecodedImages = batch["image"]
        images = [wait() for wait in decoded.images]
        finished = [_finish(array, *changes) for array, changes in zip(images, decoded.changes, strict=True)]
        shape = (decoded.rows, self._size, self._size, 3)
        image = jax.make_array_from_single_device_arrays(shape, self._sharding, finished)
        self._staged.append((images, image))
        while self._staged and (len(self._staged) > STAGED_BATCHES or self._staged[0][1].is_ready()):
            self._staged.popleft()[1].block_until_ready()
        return batch | {"image": image}

    def _blocks(self, rows: int) -> list[tuple[jax.Device, slice]]:
        """Return the devices of this process and their rows, in order."""
        starts = self._sharding.addressable_devices_indices_map((len(self._sharding.device_set),))
        devices = sorted(starts, key=lambda device: starts[device][0].start or 0)
        size = rows // len(devices)
        return [(device, slice(d * size, (d + 1) * size)) for d, device in enumerate(devices)]

    def _decode(
        self, block: tuple[jax.Device, slice], data: Sequence[np.ndarray], boxes: np.ndarray
    ) -> tuple[Callable[[], jax.Array], list[int]]:
        """Decode the rows of one device; see `DeviceDecoder`. The refused rows are numbered as in the batch."""
        device, rows = block
        images, refused = self._decoders[device](data[rows], boxes[rows], self._size)
        return images, [rows.start + row for row in refused]


def _files(chunks: Sequence[np.ndarray], lengths: np.ndarray) -> list[np.ndarray]:
    """Split chunks of whole images, one after the other, by the bytes of each image."""
    files, rest = [], iter(lengths.tolist())
    for chunk in chunks:
        plain, start = np.asarray(chunk), 0  # slices of the workers' array type take 26 us each
        while start < plain.size:
            stop = start + next(rest)
            files.append(plain[start:stop])
            start = stop
    return files


def _replacements(pixels: dict[int, np.ndarray], rows: slice, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a block that the host has decoded, and their pixels.

    Padded to a power of two with a row beyond the block, so that few shapes are compiled.
    """
    replaced = [row for row in range(rows.start, rows.stop) if row in pixels]
    padded = 1 << max(0, len(replaced) - 1).bit_length()
    numbers, images = np.full(padded, rows.stop - rows.start, np.int32), np.zeros((padded, size, size, 3), np.uint8)
    for i, row in enumerate(replaced):
        numbers[i], images[i] = row - rows.start, pixels[row]
    return numbers, images


@jax.jit
def _finish(
    images: UInt8[jax.Array, "b s s 3"],
    shift: Int[jax.Array, "b 2"],
    flip: Bool[jax.Array, " b"],
    rows: Int[jax.Array, " r"],
    replacements: UInt8[jax.Array, "r s s 3"],
) -> UInt8[jax.Array, "b s s 3"]:
    """Shift and mirror images as `Geometry.finish` does, then replace rows."""
    size = images.shape[1]

    def move(image: jax.Array, shift: jax.Array, flip: jax.Array) -> jax.Array:
        pixels = jnp.arange(size)
        y = jnp.clip(pixels - shift[0], 0, size - 1)
        x = jnp.clip(jnp.where(flip, pixels[::-1], pixels) - shift[1], 0, size - 1)
        return image[y][:, x]

    moved = jax.vmap(move)(images, shift, flip)
    return moved.at[rows].set(replacements, mode="drop")
