import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from infcl_jax import siglip_loss


@functools.cache
def value_and_grad(implementation, devices, masked=False):
    mesh = oracle.mesh_of(devices)

    def loss(*args, mask=None):
        return siglip_loss(*args, mesh=mesh, implementation=implementation, mask=mask)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))


@pytest.mark.parametrize(
    ("devices", "rows", "dim", "dtype"),
    [
        *((1, 521, 33, jnp.float32), (1, 13, 384, jnp.bfloat16), (2, 521, 96, jnp.bfloat16)),
        *((4, 13, 33, jnp.bfloat16), (4, 13, 384, jnp.float32), (8, 13, 33, jnp.float32)),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_matches_oracle(implementation, devices, rows, dim, dtype):
    for kind in ("random", "duplicates", "adversarial"):
        for scale, bias in ((1.0, 0.0), (10.0, -10.0), (100.0, -30.0)):
            image, text = oracle.features(kind, devices * rows, devices * rows, dim, dtype)
            loss, gradients = value_and_grad(implementation, devices)(
                image, text, jnp.float32(scale), jnp.float32(bias)
            )
            expected_loss, expected = oracle.siglip(image, text, scale, bias)
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
            for got, want in zip(gradients[:2], expected[:2], strict=True):
                assert oracle.relative_error(got, want) <= tolerance
            for got, want in zip(gradients[2:], expected[2:], strict=True):
                assert got == pytest.approx(want, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_mask_equals_leaving_out(implementation):
    image, text = oracle.features("random", 32, 32, 33)
    keep = np.random.default_rng(2).random(32) < 0.6
    keep[8:16] = False
    loss, gradients = value_and_grad(implementation, 4)(
        image, text, jnp.float32(10), jnp.float32(-5), mask=jnp.asarray(keep)
    )
    expected_loss, expected = oracle.siglip(image[keep], text[keep], 10.0, -5.0)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients[3] == pytest.approx(expected[3], rel=1e-5)
    assert oracle.relative_error(gradients[0][keep], expected[0]) <= 1e-5
    assert oracle.relative_error(gradients[1][keep], expected[1]) <= 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": np.zeros((8, 4), np.float32)}, "same shape"),
        ({"image": np.zeros((8, 3), np.int32), "text": np.zeros((8, 3), np.int32)}, "floating dtype"),
        ({"implementation": "dense"}, "implementation"),
        ({"logit_bias": np.ones(8, np.float32)}, "logit_bias"),
        ({"axis_name": "rows"}, "enclosing shard_map, got 'rows'"),
        ({"mask": np.ones(7, bool)}, "mask"),
    ],
)
def test_bad_input_is_a_one_line_error(change, message):
    args = {"image": np.ones((8, 3), np.float32), "text": np.ones((8, 3), np.float32)}
    args |= {"logit_scale": 1.0, "logit_bias": 0.0} | change
    with pytest.raises(ValueError, match=message):
        siglip_loss(**args)
