"""Damaged and hostile inputs, a reduced count of `python -m tests.faults.inputs`."""

import pytest

from tests.faults import inputs


@pytest.mark.parametrize("kind", inputs.DRAWS)
@pytest.mark.parametrize("seed", range(10))
def test_every_sample_is_read_or_counted(kind, seed, tmp_path):
    assert inputs.run(kind, seed, tmp_path)["problem"] == ""
