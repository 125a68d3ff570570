"""Checks of the distillation loss against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from hypothesis import strategies as st
from properties import ROWS, assert_within, geometries, junk, masks, scales, with_junk

from infcl_jax.losses import clip_and_distillation


@functools.cache
def losses(implementation, devices):
    """Both losses, and the gradients of the divergence."""
    both = functools.partial(clip_and_distillation, mesh=oracle.mesh_of(devices), implementation=implementation)

    def divergence(*args, **arrays):
        clip, divergence = both(*args, **arrays)
        return divergence, clip

    return jax.jit(jax.value_and_grad(divergence, argnums=(0, 1, 2), has_aux=True))


def check(data, implementation, devices):
    """Masked rows hold junk; the teacher can be the student itself or equal to it but for its scale."""
    b = ROWS[devices]
    student = data.draw(geometries).features(b)
    teacher = student if data.draw(st.booleans()) else data.draw(geometries).features(b)
    scale, teacher_scale = data.draw(scales), data.draw(scales)
    mask, value = data.draw(masks(b)), data.draw(junk)
    weights = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 4, b).astype(np.float32)
    operands = [with_junk(a, mask, value) for a in (*student, *teacher)]
    (divergence, clip), gradients = losses(implementation, devices)(
        *operands[:2],
        jnp.float32(scale),
        *operands[2:],
        jnp.float32(teacher_scale),
        mask=mask,
        weights=with_junk(weights, mask, value),
    )
    want_clip, want, expected, sizes = oracle.distillation(student, teacher, scale, teacher_scale, mask, weights)
    largest = max(scale, teacher_scale)
    assert_within(divergence, want, 1 + want, largest)
    assert_within(clip, want_clip, 1 + want_clip, largest)
    for got, wanted, size in zip(gradients, expected, sizes, strict=True):
        assert_within(got, wanted, size, largest)
    assert not any(np.any(np.asarray(g)[~mask]) for g in gradients[:2])


def checks():
    """`{name: check(data)}` for every implementation, on 1, 4 and 8 devices."""
    cases = [("dense", 1), ("dense", 4), ("ring", 4), ("xla", 1), ("xla", 4), ("xla", 8)]
    return {f"{i}-{n}": functools.partial(check, implementation=i, devices=n) for i, n in cases}
