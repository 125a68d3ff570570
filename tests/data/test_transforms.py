import collections

import numpy as np
import pytest
from golden import make_torchvision_transforms as golden
from PIL import Image

from infcl_jax.data import Augmentation
from infcl_jax.data.transforms import Box, Geometry, random_crop_box, resize_box, resize_center_crop, shift_pixels


@pytest.fixture(scope="module")
def torchvision():
    with np.load(golden.PATH) as stored:
        return dict(stored)


def rng(seed=0):
    return np.random.default_rng(seed)


def ramp(height, width):
    """Image with the row in the red channel, the column in the green."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, np.zeros_like(rows)], axis=2).astype(np.uint8)


def test_center_crop_of_the_same_size_is_the_image_itself():
    image = ramp(32, 32)
    assert resize_center_crop(image, 32) is image
    assert Augmentation(scale=(1.0, 1.0))(image, 32, rng()) is image


@pytest.mark.parametrize("size", golden.SIZES)
@pytest.mark.parametrize("shape", golden.SHAPES)
def test_center_crop_equals_torchvision(torchvision, shape, size):
    case = golden.SHAPES.index(shape), golden.SIZES.index(size)
    output = resize_center_crop(golden.noise(*shape), size)
    np.testing.assert_array_equal(golden.center(output), torchvision["centers"][case])
    assert golden.digest(output) == torchvision["digests"][case]


@pytest.mark.parametrize("shape", [(1, 20_000), (20_001, 1), (3, 10_000)])
def test_center_crop_of_a_very_long_image_takes_little_memory(monkeypatch, shape):
    pixels = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *args: pixels.append(np.prod(size)) or resize(self, size, *args)
    )
    line = np.linspace(0, 255, max(shape)).astype(np.uint8)
    line = line[:, None, None] if shape[0] > shape[1] else line[None, :, None]
    output = resize_center_crop(np.broadcast_to(line, (*shape, 3)), 32)
    assert sum(pixels) <= 100 * 32 * 32
    assert output.shape == (32, 32, 3)
    assert 126 <= output.min() <= output.max() <= 128  # the center of the ramp


def crop_boxes(case):
    """The boxes of consecutive draws, (top, left, height, width) [n, 4]."""
    height, width, scale, ratio = case
    generator = rng(len(str(case)))
    return np.array([random_crop_box(height, width, generator, scale, ratio) for _ in range(golden.DRAWS)])


@pytest.mark.parametrize("case", golden.BOXES, ids=str)
def test_crop_boxes_have_the_distribution_of_torchvision(torchvision, case):
    row = golden.BOXES.index(case)
    values = golden.box_statistics(crop_boxes(case))
    distance = np.abs(golden.distribution(values, torchvision["points"][row]) - torchvision["shares"][row]).max()
    # Two-sample Kolmogorov-Smirnov test at level 1e-4: sqrt(-log(1e-4 / 2) / 2) sqrt(2 / n).
    assert distance < 2.23 * np.sqrt(2 / golden.DRAWS)


@pytest.mark.parametrize(
    ("height", "width", "scale", "box"),
    [
        (200, 300, (0.9, 1.0), (0, 16, 200, 267)),  # too wide: ratio 4 / 3
        (300, 200, (0.9, 1.0), (16, 0, 267, 200)),  # too tall: ratio 3 / 4
        (150, 190, (1.0, 1.0), (0, 0, 150, 190)),  # the ratio fits: the whole image
    ],
)
def test_crop_falls_back_to_the_center(height, width, scale, box):
    generator = rng()
    boxes = collections.Counter(random_crop_box(height, width, generator, scale, (3 / 4, 4 / 3)) for _ in range(1000))
    assert boxes[box] >= 950  # some tries fit to the pixel by rounding


@pytest.mark.parametrize("shape", [(40, 40), (400, 100)])
def test_crop_draws_a_fixed_number(shape):
    used, fresh = rng(), rng()
    random_crop_box(*shape, used, (0.9, 1.0), (3 / 4, 4 / 3))
    fresh.random(22)
    assert used.bit_generator.state == fresh.bit_generator.state


@pytest.mark.parametrize("shape", [(61, 97), (10, 200), (200, 10), (3, 3), (1, 7)])
def test_crop_resizes_its_box_alone(shape):
    image = rng().integers(0, 256, (*shape, 3), dtype=np.uint8)
    augmentation = Augmentation(scale=(0.2, 1.0))
    for seed in range(20):
        top, left, height, width = random_crop_box(*shape, rng(seed), (0.2, 1.0), (3 / 4, 4 / 3))
        box = Image.fromarray(image).crop((left, top, left + width, top + height))
        expected = np.asarray(box.resize((16, 16), Image.Resampling.BICUBIC))
        assert (augmentation(image, 16, rng(seed)) == expected).all()


def test_fractional_box_is_resized_in_place():
    ramps = np.stack([np.linspace(0, 240, 41)] * 33)[..., None].repeat(3, 2).round().astype(np.uint8)  # 6 per column
    resized = resize_box(Image.fromarray(ramps), Box(0.5, 4.25, 16, 32), 16)[8, 4:-4, 0]
    np.testing.assert_allclose(resized, 6 * (4.25 + 2 * np.arange(4, 12) + 0.5), atol=1)


@pytest.mark.parametrize("shift", [(0, 0), (2, -1), (-3, 5), (30, 0)])
def test_shift_moves_whole_pixels_and_repeats_the_border(shift):
    shifted = shift_pixels(ramp(20, 20), shift)
    rows, columns = (np.clip(np.arange(20) - d, 0, 19) for d in shift)
    assert (shifted[..., 0] == rows[:, None]).all() and (shifted[..., 1] == columns[None, :]).all()


def test_augmentation_draws_all_shifts():
    shifts = {Augmentation(shift=2).draw(20, 20, rng(seed)).shift for seed in range(200)}
    assert shifts == {(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)}


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flip_has_its_probability_and_keeps_the_other_draws(probability):
    plain, flipping = Augmentation(shift=1), Augmentation(shift=1, flip=probability)
    drawn = [flipping.draw(30, 40, rng(seed)) for seed in range(400)]
    assert [geometry[:2] for geometry in drawn] == [plain.draw(30, 40, rng(seed))[:2] for seed in range(400)]
    assert abs(np.mean([geometry.flip for geometry in drawn]) - probability) < 0.08 * (0 < probability < 1) + 1e-9


def test_flip_mirrors_the_shifted_image():
    image = ramp(20, 20)
    flipped = Geometry(Box(0, 0, 20, 20), (0, 3), flip=True).finish(image)
    assert (flipped[0, :, 1] == np.clip(np.arange(20) - 3, 0, 19)[::-1]).all()


@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(shift=2), Augmentation(scale=(0.3, 1.0))])
def test_augmentation_follows_the_generator_and_keeps_its_input(augmentation):
    image = rng().integers(0, 256, (48, 40, 3), dtype=np.uint8)
    copy = image.copy()
    first, again, other = (augmentation(image, 32, rng(seed)) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    assert (image == copy).all()
    assert first.shape == (32, 32, 3) and first.dtype == np.uint8


COLORS = Augmentation(color_jitter=(0.4, 1.2, 0.0, 0.1), color_jitter_prob=0.8, gray_scale_prob=0.2)


def test_colors_are_drawn_from_their_ranges():
    colors = np.stack([COLORS.draw_color(rng(seed)) for seed in range(2000)])
    assert colors.dtype == np.float32
    jitter, order, *factors, gray = colors.T
    assert abs(jitter.mean() - 0.8) < 0.03 and abs(gray.mean() - 0.2) < 0.03
    assert set(order) == set(range(24)) and np.bincount(order.astype(int)).min() > 40
    for values, low, high in zip(factors, (0.6, 0.0, 1.0, -0.1), (1.4, 2.2, 1.0, 0.1), strict=True):
        assert low <= values.min() <= low + 0.01 and high - 0.01 <= values.max() <= high
        np.testing.assert_allclose(values.mean(), (low + high) / 2, atol=0.06)


@pytest.mark.parametrize("shape", [(48, 48), (48, 40), (31, 97)])
def test_augmentation_of_the_whole_area_is_the_central_square(shape):
    image, side = golden.noise(*shape), min(shape)
    top, left = ((length - side) // 2 for length in shape)
    square = image[top : top + side, left : left + side]
    assert (Augmentation(scale=(1.0, 1.0))(image, 32, rng()) == resize_center_crop(square, 32)).all()


@pytest.mark.parametrize(
    "image", [np.zeros((8, 8, 3), np.float32), np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8)]
)
def test_bad_images(image):
    for transform in (
        resize_center_crop,
        lambda x, s: Augmentation()(x, s, rng()),
        lambda x, s: shift_pixels(x, (1, 1)),
    ):
        with pytest.raises(ValueError, match="expected an image of uint8"):
            transform(image, 8)


JITTER = {"color_jitter_prob": 0.5}


@pytest.mark.parametrize(
    "settings",
    [
        {"color_jitter": (0.1, 0.1, 0.1, 0.6), **JITTER},
        {"color_jitter": (0.1, -0.1, 0.1, 0.1), **JITTER},
        {"color_jitter": (0.1, 0.1, 0.1), **JITTER},
        {"color_jitter": (0.1, 0.1, 0.1, 0.1)},
        {"color_jitter_prob": 0.5},
        {"gray_scale_prob": -0.1},
        {"scale": (0.0, 1.0)},
        {"scale": (1.0, 0.9)},
        {"scale": (0.5, 1.5)},
        {"ratio": (2.0, 1.0)},
        {"shift": -1},
        {"flip": 1.1},
    ],
)
def test_bad_augmentation(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Augmentation(**settings)
