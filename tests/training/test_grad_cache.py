"""The settings of gradient caching: what they refuse, and how they are named."""

import inspect

import pytest
import runs

from infcl_jax import cached_value_and_grad
from infcl_jax.training import NO_CACHE, GradCacheConfig


@pytest.mark.parametrize(
    "cache", [{"keep": 1}, {"keep_residual": True}, {"offload": "host"}, {"chunk_size": 0}, {"offload": "disk"}]
)
def test_gradient_caching_that_makes_no_sense_is_an_error(cache):
    with pytest.raises(ValueError, match="expected grad_cache"):
        GradCacheConfig(**cache)


@pytest.mark.parametrize(
    ("chunk_size", "message"),
    [
        (64, "grad_cache.chunk_size <= batch_size=32, got 64; choose a smaller chunk, or None"),
        (6, "grad_cache.chunk_size to be a multiple of the 4 devices, got 6"),
    ],
)
def test_chunks_must_fit_the_batch_and_the_devices(chunk_size, message):
    for accepted in (None, 4, 32):
        GradCacheConfig(chunk_size=accepted).check_batch(32, 4)
    with pytest.raises(ValueError, match=f"^expected {message}"):
        GradCacheConfig(chunk_size=chunk_size).check_batch(32, 4)


def test_settings_are_named_where_they_differ():
    cache = GradCacheConfig(chunk_size=8, keep_residual=True)
    assert (str(cache), str(NO_CACHE)) == ("chunk_size 8, keep_residual True", "no gradient caching")
    assert NO_CACHE.changes(cache) == {"chunk_size": None, "keep_residual": False}


def test_every_setting_is_one_of_the_configuration_and_reaches_the_gradient():
    assert GradCacheConfig(**runs.config().grad_cache) == NO_CACHE
    assert NO_CACHE.options.keys() <= inspect.signature(cached_value_and_grad).parameters.keys()
    assert GradCacheConfig(chunk_size=8, keep_residual=True, offload="replay").options == {
        "chunk_size": 8,
        "keep": 0,
        "keep_names": ("residual",),
        "offload": "host",
    }
