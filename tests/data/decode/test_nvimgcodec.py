"""The GPU decoder on the CPU: its kernels compiled as C++, its packages replaced by Pillow and NumPy."""

import collections
import contextlib
import ctypes
import io
import shutil
import subprocess
import threading
import types

import jax
import numpy as np
import pytest
from PIL import Image

from infcl_jax.data.decode import nvimgcodec
from infcl_jax.data.transforms import Box, resize_box

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# Loops over the blocks and threads of a launch.
HOST = """
#include <cmath>
#define __device__ static
#define __global__
static thread_local struct { int x, y, z; } blockIdx, blockDim, threadIdx;
%s
#define LAUNCH(name, parameters, arguments) \\
  extern "C" void launch_##name(int gx, int gy, int gz, int threads, parameters) { \\
    blockDim.x = threads; \\
    for (blockIdx.z = 0; blockIdx.z < gz; ++blockIdx.z) \\
      for (blockIdx.y = 0; blockIdx.y < gy; ++blockIdx.y) \\
        for (blockIdx.x = 0; blockIdx.x < gx; ++blockIdx.x) \\
          for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) name arguments; \\
  }
#define COMMA ,
LAUNCH(resize_columns, const unsigned long long* a COMMA const long long* b COMMA const float* c COMMA const int* d
       COMMA int size COMMA unsigned char* e, (a, b, c, d, size, e))
LAUNCH(resize_rows, const unsigned char* a COMMA const float* b COMMA const int* c COMMA int size
       COMMA const long long* d COMMA unsigned char* e, (a, b, c, size, d, e))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(HOST % nvimgcodec._KERNELS)
    subprocess.run(
        [COMPILER, "-O1", "-shared", "-fPIC", "-o", folder / "kernels.so", folder / "kernels.cpp"], check=True
    )
    return ctypes.CDLL(str(folder / "kernels.so"))


class Codec:
    """nvImageCodec's interface on Pillow; decodes no progressive files."""

    BackendKind = types.SimpleNamespace(HW_GPU_ONLY=0, HYBRID_CPU_GPU=1, GPU_ONLY=2)
    ColorSpec = types.SimpleNamespace(SRGB=0)
    Backend = staticmethod(lambda kind: kind)
    DecodeParams = staticmethod(lambda **params: params)
    groups: list[int]
    streams: list
    new_images = 0

    class CodeStream:
        def __init__(self, data):
            try:
                self.file = Image.open(io.BytesIO(data.tobytes()))
            except Image.UnidentifiedImageError as error:
                raise RuntimeError(str(error)) from error
            self.width, self.height = self.file.size

    class Decoder:
        def __init__(self, device_id, backends):
            assert (device_id, backends) == (0, [0, 1, 2])

        def decode(self, streams, params, cuda_stream, images=()):
            assert params == {"apply_exif_orientation": False, "color_spec": 0, "allow_any_depth": False}
            Codec.groups.append(len(streams))
            Codec.new_images += 0 if images else len(streams)
            images = images or [Codec.Pixels() for _ in streams]
            files = [stream.file for stream in streams]
            pairs = zip(images, files, strict=True)
            return [None if file.info.get("progressive") else image.fill(file) for image, file in pairs]

    class Pixels:
        capacity = 0

        def fill(self, file):
            pitch = 3 * file.width + 5  # rows may be padded
            if self.capacity < file.height * pitch:
                self.capacity = file.height * pitch
                self.memory = np.empty(self.capacity, np.uint8)
            pixels = self.memory[: file.height * pitch].reshape(file.height, pitch)
            pixels[:, : 3 * file.width] = np.asarray(file.convert("RGB")).reshape(file.height, -1)
            pixels[:, 3 * file.width :] = 99
            self.strides = (pitch, 3, 1)
            self.__cuda_array_interface__ = {"data": (self.memory.ctypes.data, False)}
            return self


def cupy(kernels):
    """CuPy's interface on NumPy and the compiled kernels."""

    class Device(contextlib.nullcontext):
        def __init__(self, number):
            super().__init__()
            self.id = number

    class Stream:
        """Stream whose work is done as late as possible, when the host waits for it."""

        ptr = 7
        current = threading.local()

        def __init__(self, non_blocking, priority):
            assert non_blocking and priority < 0
            self.queued, self.done = collections.deque(), 0
            Codec.streams.append(self)

        def __enter__(self):
            self.current.stream = self

        def __exit__(self, *_):
            del self.current.stream

        def record(self):
            last = self.done + len(self.queued)
            return types.SimpleNamespace(synchronize=lambda: self.run(last))

        def synchronize(self):
            self.run(self.done + len(self.queued))

        def run(self, last):
            while self.done < last:
                self.queued.popleft()()
                self.done += 1

    class Array(np.ndarray):
        def set(self, array, stream):
            assert stream.ptr == Stream.ptr and array.base is not None  # pinned memory
            stream.queued.append(lambda: np.copyto(self, array))

    def function(name):
        def launch(grid, block, arguments):
            pointers = [a.ctypes.data_as(ctypes.c_void_p) if a.ndim else ctypes.c_int(int(a)) for a in arguments]
            run = getattr(kernels, f"launch_{name}")
            Stream.current.stream.queued.append(lambda: run(*grid, *block, *pointers))

        return launch

    class Pool:
        free = 2**33

        def free_all_blocks(self):
            self.free = 2**34

    pool = Pool()
    runtime = types.SimpleNamespace(memGetInfo=lambda: (pool.free, 2**37))
    cuda = types.SimpleNamespace(Device=Device, Stream=Stream, runtime=runtime, alloc_pinned_memory=bytearray)
    module = types.SimpleNamespace(get_function=function)
    return types.SimpleNamespace(
        cuda=cuda,
        RawModule=lambda code: module,
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        get_default_memory_pool=lambda: pool,
    )


@pytest.fixture
def decoders(monkeypatch, kernels):
    Codec.groups, Codec.streams, Codec.new_images = [], [], 0
    monkeypatch.setattr(nvimgcodec, "_import_packages", lambda: (Codec, cupy(kernels)))
    device = type("Device", (), {"local_hardware_id": 0})()
    return lambda rows=8: nvimgcodec.open_decoders([device], rows, 32)[device]


def jpeg(height, width, seed=0, **options):
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height)).save(file, "jpeg", **options)
    return np.frombuffer(file.getvalue(), np.uint8)


def decode(decoder, data, boxes, size):
    wait, refused = decoder(data, np.array(boxes, np.float32), size)
    images = wait()
    assert isinstance(images, jax.Array)
    return np.asarray(images), refused


def expected(data, box, size):
    return resize_box(Image.open(io.BytesIO(data.tobytes())).convert("RGB"), Box(*box), size)


BOXES = [(0, 0, 90, 120), (3, 5, 80, 100), (10.5, 0.25, 60, 90.5), (89, 119, 1, 1), (7, 8, 20, 30), (0, 30, 90, 7)]
WIDE, NARROW = slice(0, 5), slice(5, 6)


@pytest.mark.parametrize("size", [1, 16, 32, 130])
def test_resize_agrees_with_pillow(decoders, size):
    data = [jpeg(90, 120, seed) for seed, _ in enumerate(BOXES)]
    images, refused = decode(decoders(), data, BOXES, size)
    assert refused == []
    pillow = np.stack([expected(*case, size) for case in zip(data, BOXES, strict=True)])
    differences = np.abs(images.astype(int) - pillow)
    # Pillow's weights have 22 fractional bits, which decides how levels near one half are rounded.
    assert differences[WIDE].max() <= 1 and (differences[WIDE] > 0).mean() < 0.01
    # Pillow 13 resizes the rows of narrow boxes before their columns, and rounds in between.
    assert differences[NARROW].max() <= 6 and differences[NARROW].mean() < 0.5


@pytest.mark.parametrize(
    "lanes,group_images,group_bytes",
    [(1, 256, 2**28), (2, 2, 2**28), (1, 256, 3 * 90 * (120 + 32) * 3), (1, 9, 1), (12, 256, 2**28)],
)
def test_groups_and_refused_rows(monkeypatch, decoders, group_images, group_bytes, lanes):
    monkeypatch.setattr(nvimgcodec, "LANES", lanes)
    monkeypatch.setattr(nvimgcodec, "LIBRARY_BYTES", 0)
    monkeypatch.setattr(nvimgcodec, "GROUP_IMAGES", group_images)
    monkeypatch.setattr(nvimgcodec, "GROUP_BYTES", group_bytes)
    data = [jpeg(90, 120, row, progressive=row == 4) for row in range(9)]
    data[2], data[6] = np.zeros(0, np.uint8), np.frombuffer(b"no image", np.uint8)
    box = (5, 6, 70, 80)
    images, refused = decode(decoders(), data, [box] * 9, 32)
    assert refused == [2, 4, 6]
    assert sum(Codec.groups) == 7
    assert max(Codec.groups) <= (largest := min(group_images, max(1, group_bytes // (3 * 90 * (120 + 32))), 7))
    assert lanes > 1 or max(Codec.groups) == largest
    for row in set(range(9)) - set(refused):
        assert np.abs(images[row].astype(int) - expected(data[row], box, 32)).max() <= 1


@pytest.mark.parametrize("kept_bytes,new", [(2**28, 7), (75_000, 8), (0, 12)])
def test_memory_of_images_is_reused_up_to_a_limit(monkeypatch, decoders, kept_bytes, new):
    """Decode two batches in groups of three images of about 33 kB; one file of each batch is refused."""
    monkeypatch.setattr(nvimgcodec, "LANES", 1)
    monkeypatch.setattr(nvimgcodec, "GROUP_IMAGES", 3)
    monkeypatch.setattr(nvimgcodec, "KEPT_BYTES", kept_bytes)
    decoder, box = decoders(), [(5, 6, 70, 80)] * 6
    for batch in range(2):
        data = [jpeg(90 + row, 120 - batch, row, progressive=row == 4) for row in range(6)]
        images, refused = decode(decoder, data, box, 32)
        assert refused == [4]
        for row in {0, 1, 2, 3, 5}:
            assert np.abs(images[row].astype(int) - expected(data[row], box[row], 32)).max() <= 1
    assert Codec.new_images == new


@pytest.mark.parametrize("group_images", [1, 2, 3])
def test_next_batches_are_decoded_before_the_last_images_are_there(monkeypatch, decoders, group_images):
    monkeypatch.setattr(nvimgcodec, "GROUP_IMAGES", group_images)
    decoder, box = decoders(), (5, 6, 70, 80)
    batches = [[jpeg(90, 120, 10 * batch + row) for row in range(5)] for batch in range(3)]
    waits = [decoder(batch, np.array([box] * 5, np.float32), 32)[0] for batch in batches]
    assert all(stream.queued for stream in Codec.streams)
    for batch, wait in reversed(list(zip(batches, waits, strict=True))):
        for data, image in zip(batch, np.asarray(wait()), strict=True):
            assert np.abs(image.astype(int) - expected(data, box, 32)).max() <= 1


def test_no_image_at_all(decoders):
    images, refused = decode(decoders(), [np.zeros(0, np.uint8)] * 2, np.zeros((2, 4)), 8)
    assert images.shape == (2, 8, 8, 3) and refused == [0, 1]


def test_memory_is_checked(decoders):
    assert nvimgcodec.memory_bytes(8, 32) == 5 * 8 * 3 * 32**2 + 2 * (2**29 + 2**30)
    decoders()
    with pytest.raises(
        ValueError, match=r"^expected 146\.1 GiB of GPU memory outside .* got 16\.0 GiB; set XLA_CLIENT_MEM"
    ):
        decoders(rows=10**7)


def test_a_decoder_that_does_not_start_is_one_line(monkeypatch):
    def fail():
        raise ImportError("libnvjpeg.so.13: no such file")

    monkeypatch.setattr(nvimgcodec, "_import_packages", fail)
    with pytest.raises(ValueError, match=r"^expected nvImageCodec to start, got libnvjpeg.* choose decode='pillow'$"):
        nvimgcodec.open_decoders([None], 8, 32)
