import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from experiments.benchmarks.photographs import photograph
from infcl_jax.data import Augmentation
from infcl_jax.data.decode import decode, pillow
from infcl_jax.data.decode.pillow import decode_crop
from infcl_jax.data.transforms import resize_box

RGB = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def encoded(image, format="png", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def reference(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize(
    "mode,format",
    [
        ("RGB", "png"),
        ("RGB", "jpeg"),
        ("RGB", "webp"),
        ("RGB", "bmp"),
        ("RGB", "tiff"),
        ("L", "jpeg"),
        ("L", "png"),
        ("1", "png"),
        ("P", "png"),
        ("P", "gif"),
        ("CMYK", "jpeg"),
        ("CMYK", "tiff"),
        ("YCbCr", "tiff"),
    ],
)
def test_opaque_images_equal_the_conversion_of_pillow(mode, format):
    data = encoded(Image.fromarray(RGB).convert(mode), format)
    assert decode(data).dtype == np.uint8 and decode(data).shape == (6, 9, 3)
    np.testing.assert_array_equal(decode(data), reference(data))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "L", "RGB"])
def test_transparent_pixels_are_white(mode):
    image = Image.fromarray(RGB).convert("RGBA")
    image.putalpha(Image.fromarray(np.where(np.arange(54).reshape(6, 9) % 2, 255, 0).astype(np.uint8)))
    if mode == "PA":
        data = encoded(image.quantize(255))
    elif mode in ("P", "L", "RGB"):
        gray = np.full((6, 9), 7, np.uint8)
        gray[:, ::2] = 1
        image = Image.fromarray(gray).convert(mode)
        data = encoded(image, transparency=(1, 1, 1) if mode == "RGB" else 1)
    else:
        data = encoded(image.convert(mode))
    result, expected = decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
    opaque = expected[..., 3] == 255
    assert set(np.unique(expected[..., 3])) == {0, 255}
    assert (result[~opaque] == 255).all()
    np.testing.assert_array_equal(result[opaque], expected[opaque, :3])


def test_half_transparent_pixels_mix_with_white():
    data = encoded(Image.new("RGBA", (2, 2), (0, 100, 200, 51)))
    np.testing.assert_array_equal(decode(data)[0, 0], [204, 224, 244])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["jpeg", "png", "webp", "tiff"])
def test_exif_orientation_is_applied(orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (16, 32))
    image.paste("red", (0, 0, 8, 16))  # the stored top left
    result = decode(encoded(image, format, exif=exif))
    assert result.shape[:2] == ((32, 16) if orientation < 5 else (16, 32))
    red = (result[..., 0] > 128)[[3, 3, -4, -4], [3, -4, 3, -4]].tolist()
    corner = {1: 0, 2: 1, 3: 3, 4: 2, 5: 0, 6: 1, 7: 3, 8: 2}[orientation]
    assert red == [index == corner for index in range(4)]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_keeps_the_pixels():
    data = encoded(Image.fromarray(RGB), "jpeg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    np.testing.assert_array_equal(decode(data), reference(data))


@pytest.mark.parametrize(
    "levels,format,expected",
    [
        (np.array([[0, 257], [32896, 65535]], np.uint16), "png", [[0, 1], [128, 255]]),
        (np.array([[0, 257], [32896, 65535]], np.uint16), "tiff", [[0, 1], [128, 255]]),
        (np.array([[-100, 0], [100, 155]], np.int32), "tiff", [[0, 100], [200, 255]]),
        (np.array([[0.0, 0.2], [0.6, 1.0]], np.float32), "tiff", [[0, 51], [153, 255]]),
        (np.array([[0.0, np.nan], [2.0, 1.0]], np.float32), "tiff", [[0, 0], [255, 128]]),
        (np.full((2, 2), 7, np.int32), "tiff", [[0, 0], [0, 0]]),
    ],
)
def test_deep_images_are_scaled(levels, format, expected):
    result = decode(encoded(Image.fromarray(levels), format))
    np.testing.assert_array_equal(result, np.repeat(np.array(expected)[..., None], 3, axis=2))


def png(width, height, depth, color_type, rows=b"", transparent=None):
    """A PNG of packed rows, with a transparent color."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)),
        *([] if transparent is None else [(b"tRNS", np.array(transparent, ">u2").tobytes())]),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("channels,depth", [(1, 1), (1, 2), (1, 4), (1, 16), (3, 16)])
def test_a_transparent_color_is_that_of_the_8_bit_image(channels, depth):
    factor = (2**depth - 1) / 255
    levels = np.random.default_rng(0).choice([0, 255] if depth == 1 else [0, 85, 170, 255], (4, 8, channels))

    def image(depth, factor):
        samples = np.rint(levels * factor).astype(">u2")
        bits = np.unpackbits(samples.reshape(4, -1, 1).view(np.uint8), axis=2)[..., -depth:]
        rows = np.pad(np.packbits(bits.reshape(4, -1), axis=1), ((0, 0), (1, 0))).tobytes()
        return png(8, 4, depth, channels - 1, rows, samples[1, 1])

    expected = np.where((levels == levels[1, 1]).all(2, keepdims=True), 255, levels.repeat(3 // channels, axis=2))
    for data in (image(8, 1), image(depth, factor)):
        np.testing.assert_array_equal(decode(data), expected)
        np.testing.assert_array_equal(*cropped(data, 2, 0))


@pytest.mark.parametrize("key", [(4660, 0, 0), (0, 0, 4660)])
def test_a_transparent_16_bit_color_is_compared_by_its_high_bytes(key):
    rows = b"\0" + np.array([key, (1, 2, 3)], ">u2").tobytes()
    assert (decode(png(2, 2, 16, 2, 2 * rows, key)) == [[255] * 3, [0] * 3]).all()


def header_only(width, height):
    """A PNG with the size in its header and hardly any data."""
    return png(width, height, 8, 2)


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (20000, 100), (100, 20000), (10001, 10000)])
def test_the_limits_are_stated(size):
    match = f"sides of 2 to 16384 pixels and at most 100000000 pixels, got {size[0]} x {size[1]}; max_image"
    with pytest.raises(ValueError, match=match):
        decode(header_only(*size))


@pytest.mark.parametrize("size", [(9500, 9500), (16384, 16384)])
def test_the_limit_is_an_argument_and_pillow_has_none_of_its_own(size):
    pixels = size[0] * size[1]
    with pillow.open_image(header_only(*size), max_pixels=pixels) as file:  # Pillow's warning would be an error
        assert file.size == size
    with (
        pytest.raises(ValueError, match=f"at most {pixels - 1} pixels"),
        pillow.open_image(header_only(*size), max_pixels=pixels - 1),
    ):
        pass


def test_strips_leave_no_seams(monkeypatch):
    rng = np.random.default_rng(0)
    images = [
        Image.fromarray(rng.integers(0, 256, (13, 9, 4), dtype=np.uint8)),
        Image.fromarray(rng.normal(size=(13, 9)).astype(np.float32)),
    ]
    files = [encoded(image, "tiff") for image in images]
    whole = [decode(data) for data in files]
    monkeypatch.setattr(pillow, "_STRIP_PIXELS", 20)  # two rows
    for data, expected in zip(files, whole, strict=True):
        np.testing.assert_array_equal(decode(data), expected)


def test_bombs_are_refused_before_decoding():
    with pytest.raises(Image.DecompressionBombError):
        decode(header_only(100000, 100000))


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n"])
def test_other_files_are_refused(data):
    with pytest.raises(ValueError, match="expected an image file in one of JPEG, PNG"):
        decode(data)


def test_truncated_images_are_refused():
    data = encoded(Image.fromarray(RGB), "jpeg")
    with pytest.raises(OSError, match="truncated"):
        decode(data[:-20])


def test_formats_are_known_to_pillow():
    Image.init()
    assert set(pillow.FORMATS) - {"AVIF", "JPEG2000"} <= set(Image.OPEN)


def cropped(data, size, seed):
    """The result of `decode_crop`, and the same crop of the fully decoded image."""
    drawn = []

    def draw(height, width):
        drawn.append(Augmentation(shift=2, flip=0.5).draw(height, width, np.random.default_rng(seed)))
        return drawn[-1]

    crop, whole = decode_crop(data, draw, size), Image.fromarray(decode(data))
    return crop, drawn[0].finish(resize_box(whole, drawn[0].box, size))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_reduced_jpeg_is_close_to_the_full_decoding(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    subsampling, size = [(0, 32), (2, 60), (0, 113)][orientation % 3]
    for seed, shape in enumerate([(240, 320), (241, 319), (361, 270)]):
        data = encoded(photograph(0, *shape), "jpeg", quality=90, subsampling=subsampling, exif=exif)
        crop, expected = cropped(data, size, seed)
        difference = np.abs(crop.astype(int) - expected)
        assert difference.mean() < 1 and difference.max() <= 16


@pytest.mark.parametrize("size,factor", [(224, 1), (200, 1), (120, 1), (105, 2), (55, 4), (28, 8), (8, 8)])
def test_reduction_keeps_the_pixels_of_the_box(monkeypatch, size, factor):
    loaded = []
    resize = Image.Image.crop
    monkeypatch.setattr(Image.Image, "crop", lambda self, box: loaded.append(self.size) or resize(self, box))
    cropped(encoded(photograph(0, 225, 300), "jpeg"), size, 0)
    assert loaded[0] == (-(-300 // factor), -(-225 // factor))


@pytest.mark.parametrize("format,size", [("png", 20), ("webp", 20), ("tiff", 20), ("jpeg", 100)])
@pytest.mark.parametrize("orientation", [1, 6])
def test_other_images_are_decoded_in_full(format, size, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photograph(0, 90, 120), format, exif=exif)
    for seed in range(3):
        np.testing.assert_array_equal(*cropped(data, size, seed))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_reduced_jpeg_keeps_its_colors(mode):
    crop, expected = cropped(encoded(photograph(0, 240, 320).convert(mode), "jpeg", quality=95), 50, 0)
    assert np.abs(crop.astype(int) - expected).mean() < 2


def test_truncated_jpeg_is_refused_when_reduced():
    with pytest.raises(OSError, match="truncated"):
        cropped(encoded(photograph(0, 240, 320), "jpeg")[:-2000], 50, 0)
