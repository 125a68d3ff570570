"""Random settings, a reduced count of `python -m tests.faults.settings`."""

import numpy as np
import pytest

from tests.faults import settings


@pytest.mark.parametrize("seed", range(25))
def test_a_setting_is_refused_in_one_line_or_planned(seed):
    assert settings.problem(settings.draw(np.random.default_rng(seed)))[1] == ""
