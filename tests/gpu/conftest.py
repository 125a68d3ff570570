"""Parametrize every test of this folder over the GPU's fused implementations."""

import pytest

from infcl_jax.ops.pairwise_lse import available_implementations


@pytest.fixture(params=["mosaic_gpu", "triton"])
def implementation(request):
    if request.param not in available_implementations():
        pytest.skip(f"{request.param} has no kernels for this device")
    return request.param
