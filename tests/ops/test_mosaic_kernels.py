"""Kernels of a lowered program: each once, and as the program calls it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from gpus import ALONE, count_kernels

from infcl_jax import clip_loss
from infcl_jax.ops.common.mosaic_kernels import _TARGET, compile_kernels, mosaic_kernels

SHAPES = (*[jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)] * 2, jax.ShapeDtypeStruct((), jnp.float32))


def lowered(function, *arrays):
    with jax.sharding.use_abstract_mesh(ALONE):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))


@pytest.fixture(scope="module")
def step():
    """The loss and its gradients twice, so that each kernel is called more than once."""
    loss = jax.value_and_grad(functools.partial(clip_loss, implementation="mosaic_gpu"), argnums=(0, 1))
    return lowered(lambda x, y, scale: (loss(x, y, scale), loss(y, x, scale)), *SHAPES)


def test_each_kernel_is_found_once(step):
    kernels = mosaic_kernels(step)
    assert len({kernel["kernel_hash"] for kernel in kernels}) == len(kernels) == count_kernels(step.as_text()) > 1


def test_a_kernel_alone_has_the_attributes_of_the_program(step):
    for attributes in mosaic_kernels(step):
        call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.float32))
        assert mosaic_kernels(lowered(functools.partial(call, **attributes))) == [attributes]


def test_every_kernel_is_compiled_and_its_errors_are_the_futures(step):
    """A CPU has no such kernels."""
    kernels = mosaic_kernels(step)
    futures = compile_kernels(kernels)
    assert len(futures) == len(kernels)
    for future in futures:
        assert _TARGET in str(future.exception(timeout=60))


def test_a_program_may_have_no_kernels():
    assert mosaic_kernels(jax.jit(jnp.sin).lower(1.0)) == []
