"""Second derivatives and forward mode: Hessian products where they are free, else errors that name what works."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from infcl_jax import clip_loss, create_samples, distillation_loss, global_contrastive_loss, siglip_loss

ROWS, WIDTH = 4, 3
X, Y = (np.asarray(a) for a in oracle.features("random", ROWS, ROWS, WIDTH))
TANGENT = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)


def global_loss(x, **options):
    settings = {"variant": "fastclip_v3", "gamma": 0.8, "rho": 6.5, "logit_scale": 14.3}
    return global_contrastive_loss(x, Y, jnp.arange(ROWS), create_samples(ROWS), **settings, **options)[0]


LOSSES = {
    "clip": lambda x, **options: clip_loss(x, Y.astype(x.dtype), 14.3, **options),
    "siglip": lambda x, **options: siglip_loss(x, Y.astype(x.dtype), 10.0, -10.0, **options),
    "distillation": lambda x, **options: distillation_loss(x, Y.astype(x.dtype), 14.3, Y, Y, 10.0, **options),
    "global": global_loss,
}
DERIVATIVES = {
    "forward": lambda f: jax.jvp(f, (X,), (TANGENT,))[1],
    "forward compiled": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (TANGENT,))[1])(X),
    "linearized": lambda f: jax.linearize(f, X)[1](TANGENT),
    "reverse over forward": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (TANGENT,))[1])(X),
    "reverse over reverse": lambda f: jax.grad(lambda x: (jax.grad(f)(x) * TANGENT).sum())(X),
    "forward over reverse": lambda f: jax.jvp(jax.grad(f), (X,), (TANGENT,))[1],
}


def loss_on(name, devices, implementation="xla"):
    mesh = None if devices == 1 else oracle.mesh_of(devices)
    return functools.partial(LOSSES[name], mesh=mesh, implementation=implementation)


def hessian_product(f, step=1e-6):
    gradient = jax.jit(jax.grad(f))
    ends = (gradient(X.astype(np.float64) + t * TANGENT) for t in (step, -step))
    return np.subtract(*ends) / (2 * step)


@pytest.mark.parametrize(
    ("name", "devices"), [("clip", 1), ("clip", 2), ("siglip", 2), ("distillation", 1), ("global", 1)]
)
def test_other_derivatives_are_errors_that_name_what_is_supported(name, devices):
    for derivative, compute in DERIVATIVES.items():
        if derivative == "forward over reverse" and name != "global":
            continue
        with pytest.raises(ValueError, match=r"^expected .*reverse mode.*, got .*; (use|write|the gradient)"):
            compute(loss_on(name, devices))


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_forward_over_reverse_is_the_hessian_product(name):
    with jax.enable_x64(True):
        expected = hessian_product(loss_on(name, 1))
    got = DERIVATIVES["forward over reverse"](loss_on(name, 2))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("derivative", ["forward compiled", "reverse over forward"])
def test_dense_has_every_derivative(derivative):
    got, slope = DERIVATIVES[derivative](loss_on("clip", 2, "dense")), jax.grad(loss_on("clip", 1))(X)
    expected = (slope * TANGENT).sum() if np.ndim(got) == 0 else DERIVATIVES["forward over reverse"](loss_on("clip", 1))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
