"""Image decoder of the GPU, nvImageCodec."""

import concurrent.futures
import ctypes
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, UInt8

from infcl_jax.data.decode.device import STAGED_BATCHES

LANES = 2  # threads that decode for one GPU
GROUP_IMAGES = 256  # images decoded at a time
GROUP_BYTES = 2**27  # decoded and half-resized pixels of a group
KEPT_BYTES = 2**27  # decoded images of a group whose memory the next ones reuse
LIBRARY_BYTES = 2**30  # buffers of nvImageCodec and nvJPEG, not measured

_HIGHEST_PRIORITY = -5  # of CUDA streams
# Seconds that the decoding threads wait for Python's global lock while another thread is busy. They ask for it once per
# image, and the default is 5 ms.
_SWITCH_INTERVAL = 1e-4
_THREADS = 128  # of a CTA of the kernels; consecutive threads compute consecutive columns

# Kernels that crop and resize images of different sizes. JAX queues its programs on one stream per GPU, where they
# would wait for the training steps ahead of them. These run on the decoder's stream.
# Both compute one pixel of one image per thread: column blockIdx.x * blockDim.x + threadIdx.x, row blockIdx.y,
# image blockIdx.z. The rows between the passes are uint8, as in Pillow.
_KERNELS = r"""
// Bicubic kernel of Keys (1981) with a = -0.5.
__device__ float bicubic(float x) {
  x = fabsf(x);
  if (x < 1.0f) return (1.5f * x - 2.5f) * x * x + 1.0f;
  if (x < 2.0f) return ((-0.5f * x + 2.5f) * x - 4.0f) * x + 2.0f;
  return 0.0f;
}

// One RGB pixel of an axis resized from `length` pixels, from fractional pixel `start` on, to `size` pixels.
// The support grows with the reduction (antialiasing). Weights outside of the whole pixels [0, limit) are zero.
__device__ void resample(const unsigned char* pixels, long long stride, int limit, float start, float length, int size,
                         int index, unsigned char* result) {
  float scale = length / size;
  float filter_scale = scale > 1.0f ? scale : 1.0f;
  float center = start + (index + 0.5f) * scale;
  int first = (int)floorf(center - 2.0f * filter_scale + 0.5f);
  int last = (int)floorf(center + 2.0f * filter_scale + 0.5f);
  first = first < 0 ? 0 : first;
  last = last > limit ? limit : last;
  float weights = 0.0f, sums[3] = {0.0f, 0.0f, 0.0f};
  for (int i = first; i < last; ++i) {
    float weight = bicubic((i + 0.5f - center) / filter_scale);
    const unsigned char* pixel = pixels + i * stride;
    weights += weight;
    for (int c = 0; c < 3; ++c) sums[c] += weight * pixel[c];
  }
  for (int c = 0; c < 3; ++c) {
    float level = floorf(sums[c] / weights + 0.5f);
    result[c] = (unsigned char)(level < 0.0f ? 0.0f : level > 255.0f ? 255.0f : level);
  }
}

// images [n]: addresses of uint8 [H, W, 3]; pitches [n]: bytes per row; boxes [n, 4]: top, left, height, width;
// offsets [n + 1]: first row of each image in `rows`, uint8 [offsets[n], size, 3].
extern "C" __global__ void resize_columns(const unsigned long long* images, const long long* pitches,
                                          const float* boxes, const int* offsets, int size, unsigned char* rows) {
  int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, n = blockIdx.z;
  if (column >= size || row >= offsets[n + 1] - offsets[n]) return;
  const float* box = boxes + 4 * n;
  int top = (int)floorf(box[0]), left = (int)floorf(box[1]);
  const unsigned char* pixels = (const unsigned char*)images[n] + (top + row) * pitches[n] + 3LL * left;
  resample(pixels, 3, (int)ceilf(box[1] + box[3]) - left, box[1] - left, box[3], size, column,
           rows + ((long long)(offsets[n] + row) * size + column) * 3);
}

// results [n]: first row of each image in `resized`, uint8 [..., size, 3].
extern "C" __global__ void resize_rows(const unsigned char* rows, const float* boxes, const int* offsets, int size,
                                       const long long* results, unsigned char* resized) {
  int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, n = blockIdx.z;
  if (column >= size) return;
  const float* box = boxes + 4 * n;
  const unsigned char* pixels = rows + ((long long)offsets[n] * size + column) * 3;
  resample(pixels, 3LL * size, offsets[n + 1] - offsets[n], box[0] - floorf(box[0]), box[2], size, row,
           resized + ((results[n] + row) * size + column) * 3);
}
"""


def open_decoders(devices: Sequence[jax.Device], rows: int, size: int) -> dict[jax.Device, "NvImageCodecDecoder"]:
    """Create a decoder for each GPU of this process, for `rows` images of `size` x `size` pixels.

    Raises:
      ValueError: the decoders do not start, or JAX has left too little memory for them.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL))
    try:
        decoders = {device: NvImageCodecDecoder(device) for device in devices}
        free = min(decoder.free_bytes() for decoder in decoders.values())
    except Exception as error:  # the packages raise exceptions of their own
        raise ValueError(f"expected nvImageCodec to start, got {error}; choose decode='pillow'") from error
    if free < (needed := memory_bytes(rows, size)):
        raise ValueError(
            f"expected {needed / 2**30:.1f} GiB of GPU memory outside of JAX's for decode='nvimgcodec', got "
            f"{free / 2**30:.1f} GiB; set XLA_CLIENT_MEM_FRACTION to a lower share, or choose decode='pillow'"
        )
    return decoders


def memory_bytes(rows: int, size: int) -> int:
    """Bytes of GPU memory that a decoder takes outside of JAX's memory, for `rows` images of `size` x `size` pixels.

    Staged batches, one that waits and one being decoded; two groups of decoded images for each thread, and the memory
    kept for the next ones; the library's buffers.
    """
    groups = LANES * 2 * (GROUP_BYTES + KEPT_BYTES)
    return (STAGED_BATCHES + 3) * rows * 3 * size**2 + groups + LANES * LIBRARY_BYTES


class NvImageCodecDecoder:
    """Decoder of one GPU, a `DeviceDecoder`.

    Decodes with the GPU's JPEG engines, or its SMs if there are none, and resizes with `_KERNELS`. `LANES` threads
    share the images. All work runs on streams of its own, which overlap training.

    `CUDA_DEVICE_MAX_CONNECTIONS=32` must be set before CUDA starts (`infcl_jax.distributed.initialize`). With fewer
    connections, decoding waits for the queued training programs.
    """

    def __init__(self, device: jax.Device) -> None:
        codec, self._cupy = _import_packages()
        self._device = self._cupy.cuda.Device(device.local_hardware_id)
        self._lanes = [_Lane(codec, self._cupy, self._device) for _ in range(LANES)]
        self._threads = concurrent.futures.ThreadPoolExecutor(LANES, "nvimgcodec")

    def free_bytes(self) -> int:
        """Bytes of GPU memory that JAX has not reserved and nothing else uses."""
        with self._device:
            self._cupy.get_default_memory_pool().free_all_blocks()  # of earlier decoders
            return self._cupy.cuda.runtime.memGetInfo()[0]

    def __call__(
        self, encoded: Sequence[np.ndarray], boxes: Float[np.ndarray, "b 4"], size: int
    ) -> tuple[Callable[[], UInt8[jax.Array, "b s s 3"]], list[int]]:
        """Decode, crop and resize images, see `DeviceDecoder`."""
        with self._device:
            resized = self._cupy.empty((len(encoded), size, size, 3), np.uint8)
        ends = [len(encoded) * lane // LANES for lane in range(LANES + 1)]
        slices = [slice(*ends[lane : lane + 2]) for lane in range(LANES)]
        arguments = [(encoded[rows], boxes[rows], resized[rows]) for rows in slices]
        decoded = list(self._threads.map(_Lane.decode, self._lanes, *zip(*arguments, strict=True)))
        refused = [rows.start + row for rows, (own, _) in zip(slices, decoded, strict=True) for row in own]

        def wait() -> jax.Array:
            for _, done in decoded:
                done.synchronize()
            return jax.dlpack.from_dlpack(resized)

        return wait, refused


class _Decoded(NamedTuple):
    """Decoded image whose memory is reused."""

    image: Any  # of nvImageCodec
    capacity: int  # bytes of its memory
    address: int  # of its memory, which is slow to read

    @classmethod
    def of(cls, image: Any) -> "_Decoded | None":
        """Read the memory of an image; None for None."""
        return None if image is None else cls(image, image.capacity, image.__cuda_array_interface__["data"][0])


class _Vectors:
    """Vectors of a group for the resize kernels, in memory that is reused.

    `cupy.asarray` allocates pinned memory, which took up to 1.6 s during a training step of 4 s on an H100.
    """

    def __init__(self, cupy: Any) -> None:
        # Address, pitch, row of the result, box and offset of each image, and one more offset.
        size = GROUP_IMAGES * (3 * 8 + 4 * 4 + 4) + 4
        self._host = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        self._device = cupy.empty(size, np.uint8)

    def copy(self, arrays: Sequence[np.ndarray], stream: Any) -> list[Any]:
        """Copy arrays to the GPU as bytes, one after the other.

        They are in decreasing order of their item size, so that they are aligned.
        """
        ends = np.cumsum([array.nbytes for array in arrays]).tolist()
        host = self._host[: ends[-1]]
        np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays], out=host)
        self._device[: ends[-1]].set(host, stream=stream)
        return [self._device[end - array.nbytes : end] for array, end in zip(arrays, ends, strict=True)]


class _Lane:
    """Decoder and stream of one thread.

    The last images of a call are resized while the first ones of the next call are decoded.
    """

    def __init__(self, codec: Any, cupy: Any, device: Any) -> None:
        self._codec, self._cupy, self._device = codec, cupy, device
        kinds = codec.BackendKind
        # Without CPU_ONLY: the host decodes what the GPU refuses, as it decodes all images of other formats.
        backends = [codec.Backend(kind) for kind in (kinds.HW_GPU_ONLY, kinds.HYBRID_CPU_GPU, kinds.GPU_ONLY)]
        self._decoder = codec.Decoder(device_id=device.id, backends=backends)
        self._params = codec.DecodeParams(
            apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB, allow_any_depth=False
        )
        # Images of two groups, one of which is resized while the other is decoded. Their memory is reused, because
        # allocations wait for all work on the GPU, training included.
        self._kept: tuple[list[_Decoded], list[_Decoded]] = [], []
        self._group = 0  # number of groups so far
        self._running: Any = None  # event of the previous group, and what it uses until then
        with device:
            # Its kernels start before queued kernels of training.
            self._stream = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)
            self._vectors = _Vectors(cupy), _Vectors(cupy)  # of two groups, too
            module = cupy.RawModule(code=_KERNELS)
            self._columns, self._rows = (module.get_function(name) for name in ("resize_columns", "resize_rows"))
        weakref.finalize(self, self._stream.synchronize)  # the last group is in use until then

    def decode(self, encoded: Sequence[np.ndarray], boxes: np.ndarray, resized: Any) -> tuple[list[int], Any]:
        """Decode, crop and resize images.

        Returns:
          The rows that are not decoded, in order, and the event at which the others are in `resized`, on the GPU.
        """
        size: int = resized.shape[1]
        refused: list[int] = []
        with self._device, self._stream:
            for group in self._groups(encoded, size, refused):
                slot = self._group % 2
                self._group += 1
                images = self._decode_group([stream for _, stream in group], self._kept[slot])
                decoded = [(row, image) for (row, _), image in zip(group, images, strict=True) if image is not None]
                refused += [row for (row, _), image in zip(group, images, strict=True) if image is None]
                buffer = self._resize(decoded, boxes, size, resized, self._vectors[slot]) if decoded else None
                event = self._stream.record()
                if self._running is not None:
                    self._running[0].synchronize()
                self._running = event, encoded, resized, decoded, buffer
            return sorted(refused), self._stream.record()

    def _decode_group(self, streams: Sequence[Any], kept: list[_Decoded]) -> list[_Decoded | None]:
        """Decode files into the memory of kept images, and new images for the rest; None where the GPU refuses one.

        The kept images are the last group but one, which has been resized. Those to keep replace them.
        """
        reused = min(len(kept), len(streams))
        settings = {"params": self._params, "cuda_stream": self._stream.ptr}
        decoded: list[_Decoded | None] = []
        if reused:
            images = self._decoder.decode(streams[:reused], images=[old.image for old in kept[:reused]], **settings)
            for i, image in enumerate(images):
                if image is not None and image.capacity != kept[i].capacity:  # it has moved
                    kept[i] = _Decoded.of(image)
            decoded = [None if image is None else old for image, old in zip(images, kept, strict=False)]
        if reused < len(streams):
            new = [_Decoded.of(image) for image in self._decoder.decode(streams[reused:], **settings)]
            decoded, kept[len(kept) :] = decoded + new, [image for image in new if image is not None]
        while kept and sum(image.capacity for image in kept) > KEPT_BYTES:
            kept.pop()
        return decoded

    def _groups(self, encoded: Sequence[np.ndarray], size: int, refused: list[int]) -> Iterator[list[tuple[int, Any]]]:
        """Yield groups of (row, code stream) within `GROUP_IMAGES` and `GROUP_BYTES`; append unreadable rows."""
        group: list[tuple[int, Any]] = []
        group_bytes = 0
        for row, data in enumerate(encoded):
            stream = self._open(data)
            if stream is None:
                refused.append(row)
                continue
            image_bytes = 3 * stream.height * (stream.width + size)
            if group and (len(group) == GROUP_IMAGES or group_bytes + image_bytes > GROUP_BYTES):
                yield group
                group, group_bytes = [], 0
            group.append((row, stream))
            group_bytes += image_bytes
        if group:
            yield group

    def _open(self, data: np.ndarray) -> Any:
        """Open a file; None if it is empty or its header is damaged."""
        try:
            stream = self._codec.CodeStream(data) if data.size else None
            return stream if stream and stream.height and stream.width else None
        except RuntimeError:
            return None

    def _resize(
        self, decoded: Sequence[tuple[int, Any]], boxes: np.ndarray, size: int, resized: Any, vectors: _Vectors
    ) -> Any:
        """Queue the resize of a group; return the buffer between its two passes, which must outlive it."""
        rows = np.array([row for row, _ in decoded])
        box = boxes[rows].astype(np.float32)
        heights = (np.ceil(box[:, 0] + box[:, 2]) - np.floor(box[:, 0])).astype(np.int32)
        addresses, pitches, results, boxes_on_gpu, offsets = vectors.copy(
            (
                np.array([image.address for _, image in decoded], np.uint64),
                np.array([image.image.strides[0] for _, image in decoded], np.int64),
                rows.astype(np.int64) * size,
                box,
                np.concatenate([[0], np.cumsum(heights)]).astype(np.int32),
            ),
            self._stream,
        )
        half = self._cupy.empty((int(heights.sum()), size, 3), np.uint8)
        blocks, count = -(-size // _THREADS), len(decoded)
        self._columns(
            (blocks, int(heights.max()), count),
            (_THREADS,),
            (addresses, pitches, boxes_on_gpu, offsets, np.int32(size), half),
        )
        self._rows((blocks, size, count), (_THREADS,), (half, boxes_on_gpu, offsets, np.int32(size), results, resized))
        return half


def _import_packages() -> tuple[Any, Any]:
    """Import nvImageCodec and CuPy."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # the reader logs damaged files
    # nvImageCodec opens libnvjpeg by its name, which the loader finds once the library is loaded.
    for folder in importlib.util.find_spec("nvidia").submodule_search_locations:
        for library in sorted(Path(folder).glob("*/lib/libnvjpeg.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import cupy
    from nvidia import nvimgcodec

    return nvimgcodec, cupy
