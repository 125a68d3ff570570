"""Every test of this folder runs once for each implementation that has kernels for the GPU at hand."""

import pytest

from infcl_jax.ops.pairwise_lse import available_implementations


@pytest.fixture(params=["mosaic_gpu", "triton"])
def implementation(request):
    if request.param not in available_implementations():
        pytest.skip(f"{request.param} has no kernels for this device")
    return request.param
