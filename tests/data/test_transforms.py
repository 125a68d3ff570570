import numpy as np
import pytest

from infcl_jax.data import Augmentation
from infcl_jax.data.transforms import random_resized_crop, random_shift, resize_center_crop


def rng(seed=0):
    return np.random.default_rng(seed)


def ramp(height, width):
    """An image whose red channel is the row and whose green channel is the column."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, np.zeros_like(rows)], axis=2).astype(np.uint8)


@pytest.mark.parametrize("shape", [(40, 40), (60, 40), (41, 97), (20, 30), (1, 7)])
def test_center_crop_shape_and_place(shape):
    image = resize_center_crop(ramp(*shape), 32)
    assert image.shape == (32, 32, 3) and image.dtype == np.uint8
    center = image[14:18, 14:18, :2].reshape(-1, 2).astype(float).mean(axis=0)
    np.testing.assert_allclose(center, [(side - 1) / 2 for side in shape], atol=1.0)


def test_center_crop_of_the_same_size_is_the_image_itself():
    image = ramp(32, 32)
    assert resize_center_crop(image, 32) is image
    assert Augmentation(scale=(1.0, 1.0))(image, 32, rng()) is image


def test_crop_covers_the_scale():
    image = ramp(100, 100)
    areas = []
    for seed in range(300):
        crop = random_resized_crop(image, 50, rng(seed), scale=(0.5, 1.0), ratio=(1.0, 1.0))
        sides = crop[..., :2].reshape(-1, 2).max(axis=0) - crop[..., :2].reshape(-1, 2).min(axis=0) + 1.0
        areas.append(sides.prod() / 1e4)
    assert 0.47 < min(areas) < 0.55 and 0.95 < max(areas) <= 1.0
    assert 0.70 < np.mean(areas) < 0.80


def test_whole_image_crop_is_a_resize():
    image = ramp(64, 64)
    crop = random_resized_crop(image, 32, rng(), scale=(1.0, 1.0), ratio=(1.0, 1.0))
    assert (crop == resize_center_crop(image, 32)).all()


@pytest.mark.parametrize("shape", [(10, 200), (200, 10), (3, 3)])
def test_crop_of_extreme_shapes(shape):
    for seed in range(50):
        assert random_resized_crop(ramp(*shape), 16, rng(seed)).shape == (16, 16, 3)


def test_shift_moves_whole_pixels_and_repeats_the_border():
    image = ramp(20, 20)
    moves = set()
    for seed in range(200):
        shifted = random_shift(image, 2, rng(seed))
        dy, dx = 10 - int(shifted[10, 10, 0]), 10 - int(shifted[10, 10, 1])
        moves.add((dy, dx))
        rows, columns = (np.clip(np.arange(20) - d, 0, 19) for d in (dy, dx))
        assert (shifted[..., 0] == rows[:, None]).all() and (shifted[..., 1] == columns[None, :]).all()
    assert moves == {(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)}


@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(shift=2), Augmentation(scale=(0.3, 1.0))])
def test_augmentation_follows_the_generator_and_keeps_its_input(augmentation):
    image = rng().integers(0, 256, (48, 40, 3), dtype=np.uint8)
    copy = image.copy()
    first, again, other = (augmentation(image, 32, rng(seed)) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    assert (image == copy).all()
    assert first.shape == (32, 32, 3) and first.dtype == np.uint8


@pytest.mark.parametrize(
    "image", [np.zeros((8, 8, 3), np.float32), np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8)]
)
def test_bad_images(image):
    for transform in (
        resize_center_crop,
        lambda x, s: random_resized_crop(x, s, rng()),
        lambda x, s: random_shift(x, 1, rng()),
    ):
        with pytest.raises(ValueError, match="image must be uint8"):
            transform(image, 8)


@pytest.mark.parametrize(
    "settings",
    [{"scale": (0.0, 1.0)}, {"scale": (1.0, 0.9)}, {"scale": (0.5, 1.5)}, {"ratio": (2.0, 1.0)}, {"shift": -1}],
)
def test_bad_augmentation(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Augmentation(**settings)
