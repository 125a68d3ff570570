"""Damaged and hostile image files."""

import functools
import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from infcl_jax.data.decode.pillow import FORMATS
from tests.faults.case import BYTES, Case, choose

WIDTH, HEIGHT = 37, 23  # pixels
EXTENSIONS = ("jpg", "png", "webp", "gif", "bmp", "tif", "ppm", "jp2", "avif")  # of `FORMATS`
LOSSLESS = ("PNG", "TIFF", "BMP", "PPM")
_TURNS = {2: (0, True), 3: (2, False), 4: (2, True), 5: (3, True), 6: (3, False), 7: (1, True), 8: (1, False)}


def rgb(rng: np.random.Generator) -> np.ndarray:
    """Draw pixels in blocks, which JPEG keeps."""
    blocks = rng.integers(0, 256, (-(-HEIGHT // 8), -(-WIDTH // 8), 3), dtype=np.uint8)
    return blocks.repeat(8, axis=0).repeat(8, axis=1)[:HEIGHT, :WIDTH]


def encoded(image: Image.Image, file_format: str, **options) -> bytes:
    """Encode an image, lossless where the format can."""
    if file_format == "WEBP":
        options |= {"lossless": True, "exact": True}
    buffer = io.BytesIO()
    image.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a PNG chunk."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: tuple[bytes, bytes], interlace: int = 0) -> bytes:
    """Return a PNG file of 8-bit RGB with the given chunks."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlace)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in ((b"IHDR", header), *chunks, (b"IEND", b"")))


def interlaced_png(pixels: np.ndarray) -> bytes:
    """Encode pixels with Adam7 interlacing (PNG specification, section 8.2)."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = [row for y, x, dy, dx in passes for row in pixels[y::dy, x::dx] if row.size]
    data = b"".join(b"\0" + row.tobytes() for row in rows)
    return png(*pixels.shape[1::-1], (b"IDAT", zlib.compress(data)), interlace=1)


def with_size(data: bytes, width: int, height: int) -> bytes:
    """Change the size in the header of any format."""
    for code in (">II", "<II", ">HH", "<HH"):
        if max(width, height) < 2 ** (8 * struct.calcsize(code[:2])):
            for old, new in (((WIDTH, HEIGHT), (width, height)), ((HEIGHT, WIDTH), (height, width))):
                data = data.replace(struct.pack(code, *old), struct.pack(code, *new))
    data = data.replace(b"%d %d" % (WIDTH, HEIGHT), b"%d %d" % (width, height))
    for tag, old, new in ((256, WIDTH, width), (257, HEIGHT, height)):  # of TIFF, as SHORT or LONG
        entry = struct.pack("<HHI", tag, 4, 1) + struct.pack("<I", new)
        for kind in (3, 4):
            data = data.replace(struct.pack("<HHII", tag, kind, 1, old), entry)
    if data[:4] == b"\x89PNG":
        data = data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]
    if data[12:16] == b"VP8L":  # 14 bits of each side
        bits = struct.unpack("<I", data[21:25])[0] >> 28 << 28
        data = data[:21] + struct.pack("<I", bits | (height - 1) % 2**14 << 14 | (width - 1) % 2**14) + data[25:]
    return data


@functools.cache
def bombs() -> tuple[bytes, ...]:
    """Small files of very large images, texts and profiles."""
    text = zlib.compress(bytes(2**26))
    square = Image.new("1", (12000, 12000))
    return (
        encoded(square, "PNG"),
        encoded(square, "TIFF", compression="group4"),
        encoded(Image.new("L", (11000, 11000)), "JPEG"),
        png(60000, 60000, (b"IDAT", zlib.compress(bytes(1000)))),
        png(1, 1, (b"IDAT", zlib.compress(bytes(4)))),
        png(0, 5, (b"IDAT", zlib.compress(bytes(4)))),
        png(4, 4, (b"zTXt", b"Comment\0\0" + text), (b"IDAT", zlib.compress(bytes(52)))),
        png(4, 4, (b"iCCP", b"profile\0\0" + text), (b"IDAT", b"")),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(20),
        b"P6 99999 99999 255\n" + bytes(100),
        b"P6 4 4 255\n",
    )


TEXTS = (
    b"<html>not found</html>",
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n",
    b"",
    bytes(1000),
    b"\xff\xd8\xff",
)


def oriented(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation (CIPA DC-008, table of tag 274) to stored pixels."""
    quarters, mirrored = _TURNS.get(orientation, (0, False))
    turned = np.rot90(pixels, quarters)
    return turned[:, ::-1] if mirrored else turned


def _deep(rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """16-bit, integer or float gray levels, scaled to 8 bits."""
    kind = choose(("uint16", "int32", "float32"), rng)
    if kind == "uint16":
        levels = rng.integers(0, 2**16, (HEIGHT, WIDTH), dtype=np.uint16)
        unit = levels / 65535
        data = encoded(Image.fromarray(levels), choose(("PNG", "TIFF"), rng))
    else:
        levels = (rng.normal(size=(HEIGHT, WIDTH)) * 1000).astype(kind)
        unit = (levels - float(levels.min())) / (float(levels.max()) - float(levels.min()))
        data = encoded(Image.fromarray(levels), "TIFF")
    return data, np.rint(unit * 255)[..., None].repeat(3, axis=2).astype(np.uint8)


def _mode(rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """Image of another mode; transparent pixels become white."""
    mode, pixels = choose(("1", "L", "LA", "P", "RGBA", "CMYK"), rng), rgb(rng)
    if mode in ("LA", "RGBA"):
        alpha = np.where(rng.random((HEIGHT, WIDTH)) < 0.5, 255, 0).astype(np.uint8)
        gray = pixels[..., :1].repeat(3, axis=2) if mode == "LA" else pixels
        channels = [gray[..., :1], alpha[..., None]] if mode == "LA" else [gray, alpha[..., None]]
        image = Image.fromarray(np.concatenate(channels, axis=2))
        return encoded(image, "PNG"), np.where(alpha[..., None] == 255, gray, 255).astype(np.uint8)
    if mode == "CMYK":
        return encoded(
            Image.merge("CMYK", [*Image.fromarray(255 - pixels).split(), Image.new("L", (WIDTH, HEIGHT))]), "TIFF"
        ), pixels
    if mode == "P":
        index = rng.integers(0, 16, (HEIGHT, WIDTH), dtype=np.uint8)
        palette = rng.integers(0, 256, (16, 3), dtype=np.uint8)
        image = Image.fromarray(index)
        image.putpalette(palette.tobytes())
        return encoded(image, choose(("PNG", "GIF"), rng)), palette[index]
    gray = pixels[..., 0] if mode == "L" else (pixels[..., 0] > 127) * np.uint8(255)
    return encoded(Image.fromarray(gray).convert(mode), "PNG"), gray[..., None].repeat(3, axis=2)


def _exif(rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """Image with any EXIF orientation, or damaged EXIF data."""
    pixels, orientation, exif = rgb(rng), int(rng.integers(0, 11)), Image.Exif()
    file_format = choose(("PNG", "WEBP", "TIFF"), rng)
    exif[0x0112] = orientation
    if rng.random() < 0.3 and file_format != "TIFF":  # bytes without a header of TIFF
        damaged = b"Exif\0\0MM\0*" + rng.integers(0, 256, 20, dtype=np.uint8).tobytes() + b"\xff" * 8
        return encoded(Image.fromarray(pixels), "PNG", exif=b"Exif\0\0" + b"\xff" * 4 + damaged), pixels
    return encoded(Image.fromarray(pixels), file_format, exif=exif), oriented(pixels, orientation)


def _layout(rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """Animated or interlaced image, or one with a broken color profile."""
    pixels, kind = rgb(rng), choose(("animated", "interlaced", "profile"), rng)
    image = Image.fromarray(pixels)
    if kind == "animated":
        frames = [Image.fromarray(255 - pixels)]
        return encoded(image, choose(("PNG", "WEBP", "TIFF"), rng), save_all=True, append_images=frames), pixels
    if kind == "interlaced":
        return interlaced_png(pixels), pixels
    profile = rng.integers(0, 256, 200, dtype=np.uint8).tobytes()
    return encoded(image, choose(("PNG", "WEBP", "TIFF"), rng), icc_profile=profile), pixels


def _valid(rng: np.random.Generator) -> tuple[str, bytes]:
    """Image of any format; JPEGs may be progressive."""
    number = int(rng.integers(len(FORMATS)))
    options = {"progressive": True} if FORMATS[number] == "JPEG" and rng.random() < 0.5 else {}
    return EXTENSIONS[number], encoded(Image.fromarray(rgb(rng)), FORMATS[number], **options)


def draw(rng: np.random.Generator, folder: Path) -> Case:
    """Write a folder of two intact images and six damaged, hostile or unusual ones."""
    kind = choose(("bytes", "huge", "bomb", "text", "deep", "mode", "exif", "layout", "extension"), rng)
    expected: dict[str, np.ndarray | None] = {}
    refused: list[str] = []
    for number in range(8):
        caption, extension, pixels = f"caption {number}", choose(EXTENSIONS, rng), rgb(rng)
        unusual = {"deep": _deep, "mode": _mode, "exif": _exif, "layout": _layout}
        if number % 4 == 0:
            data, expected[caption] = encoded(Image.fromarray(pixels), choose(LOSSLESS, rng)), pixels
        elif kind in unusual:
            data, expected[caption] = unusual[kind](rng)
        elif kind == "extension":  # the contents decide, not the name
            data, expected[caption] = encoded(Image.fromarray(pixels), choose(LOSSLESS, rng)), pixels
        elif kind == "bytes":
            extension, data = _valid(rng)
            data = choose(BYTES, rng)(data, rng)
        elif kind == "huge":
            extension, whole = _valid(rng)
            data = with_size(whole, *choose(((16384, 16383), (65535, 65535), (20000, 5001), (1, 65535)), rng))
            refused += [caption] if data != whole else []
        else:
            data = choose(bombs() if kind == "bomb" else TEXTS, rng)
            refused.append(caption)
        (folder / f"{number}.{extension}").write_bytes(data)
        (folder / f"{number}.txt").write_text(caption)
    return Case(kind, str(folder), expected, refused, tolerance=1 if kind in ("deep", "mode") else 0)
