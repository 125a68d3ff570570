"""Every loss on adversarial inputs against float64, on 1, 4 and 8 devices."""

import properties
import pytest

from infcl_jax.ops.pairwise.lse import available_implementations

CHECKS = properties.checks(available_implementations(), (1, 4, 8)) | properties.sigmoid_checks(
    ("xla", "ring"), (1, 4, 8)
)
# On one device, "local" and "disco" compute as "dense", and "ring" as "xla" in one strip. Only a ring differs on eight.
# "local" and "disco" differ in what they gather, so each has two losses.
REPEATED = ("local-1", "disco-1", "ring-1", "dense-8", "local-8", "disco-8", "xla-8")
REPEATED += ("retrieval-dense-1", "retrieval-local-4", "pairwise_lse-disco-4", "isogclr-local-4", "isogclr-disco-4")
OFTEN = [name for name in CHECKS if not name.endswith(REPEATED)]
NUMBERS = [
    *((name, 4) for name in OFTEN),
    *(pytest.param(name, 200, marks=pytest.mark.full) for name in CHECKS),
]


@pytest.mark.parametrize(("name", "examples"), NUMBERS)
def test_matches_float64(name, examples):
    properties.run(CHECKS[name], examples)
