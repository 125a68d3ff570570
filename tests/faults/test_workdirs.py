"""Damaged work directories, a reduced count of `python -m tests.faults.workdirs`."""

import pytest

from tests.faults import workdirs


@pytest.mark.parametrize("seed", range(20))
def test_every_file_is_read_or_named(seed, tmp_path):
    assert set(workdirs.run(seed, tmp_path).values()) <= {"read", "refused"}
