"""Losses of features of 1e30, on one device and on a mesh, against float64."""

import functools

import jax
import numpy as np
import oracle
import pytest

from infcl_jax import clip_loss, distillation_loss

ROWS, WIDTH = 8, 4
LOSSES = {
    "clip": lambda x, y, **options: clip_loss(x, y, 14.3, **options),
    "distillation": lambda x, y, **options: distillation_loss(x, y, 14.3, y, y, 10.0, **options),
}


def value_and_gradients(name, implementation, devices, features):
    mesh = None if devices == 1 else oracle.mesh_of(devices)
    loss = functools.partial(LOSSES[name], mesh=mesh, implementation=implementation)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*features)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradients_equal_float64(name):
    """At logits of 1e31 a softmax has one term, so the rounding of a logit must not change it."""
    x, y = (np.array(a) for a in oracle.features("random", ROWS, ROWS, WIDTH))
    x[3] *= 1e30
    with jax.enable_x64(True):
        expected = value_and_gradients(name, "dense", 1, (x.astype(np.float64), y.astype(np.float64)))
    for devices in (1, 2):
        got = value_and_gradients(name, "xla", devices, (x, y))
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())
