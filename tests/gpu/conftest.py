"""Parametrize every test of this folder over the GPU's fused implementations."""

import pytest

from infcl_jax.ops.pairwise.implementations import TABLE, available_implementations


@pytest.fixture(params=[name for name, row in TABLE.items() if row.requires])
def implementation(request):
    if request.param not in available_implementations():
        pytest.skip(f"{request.param} has no kernels for this device")
    return request.param
