"""Every loss on adversarial inputs against float64, on 1, 4 and 8 devices."""

import properties
import pytest

from infcl_jax.ops.pairwise_lse import available_implementations

CHECKS = properties.checks(available_implementations(), (1, 4, 8)) | properties.sigmoid_checks(
    ("xla", "ring"), (1, 4, 8)
)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    "examples", [8, pytest.param(50, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.full)]
)
def test_matches_float64(name, examples):
    properties.run(CHECKS[name], examples)
