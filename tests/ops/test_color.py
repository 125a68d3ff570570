import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_torchvision_colors as golden

from infcl_jax.ops.color import ORDERS, ColorBatch, adjust_colors, jitter_colors


@pytest.fixture(scope="module")
def torchvision():
    with np.load(golden.PATH) as stored:
        return dict(stored)


def color(case, jitter=1.0):
    order, factors, gray = case
    return np.array([jitter, ORDERS.index(order), *factors, gray], np.float32)


def adjusted(cases, **changes):
    pixels = np.stack([golden.image()] * len(cases))
    return np.asarray(jax.jit(adjust_colors)(ColorBatch(pixels, np.stack([color(case, **changes) for case in cases]))))


def test_jitter_equals_torchvision_on_tensors(torchvision):
    image = jnp.asarray(golden.image(), jnp.float32) / 255
    for case, expected in zip(golden.CASES, torchvision["tensor"], strict=True):
        order, factors, gray = case
        if not gray:
            jittered = jax.jit(jitter_colors)(image, jnp.int32(ORDERS.index(order)), jnp.array(factors))
            np.testing.assert_allclose(jittered, expected, atol=1e-5, err_msg=str(case))


def test_images_are_rounded_to_levels(torchvision):
    difference = adjusted(golden.CASES) - 255 * torchvision["tensor"]
    assert np.abs(difference).max() < 0.5 + 1e-2


def test_images_are_close_to_those_of_pil(torchvision):
    difference = np.abs(adjusted(golden.CASES).astype(int) - torchvision["pil"])
    # PIL rounds to 8 bits after each operation, the hue too.
    assert difference.mean() < 1 and difference.mean(axis=(1, 2, 3)).max() < 3


def test_unjittered_images_do_not_change():
    jittered = [case for case in golden.CASES if not case[2]]
    assert (adjusted(jittered, jitter=0.0) == golden.image()).all()
    assert (adjusted(golden.CASES[:1]) == golden.image()).all()


def test_each_image_has_its_own_order():
    orders = [(order, (0.7, 1.3, 1.2, -0.07), False) for order in ORDERS]
    together = adjusted(orders)
    assert len({image.tobytes() for image in together}) > 12
    # Batches of one order: the same program, so the same bits.
    assert all((image == adjusted([case] * len(orders))[0]).all() for image, case in zip(together, orders, strict=True))
