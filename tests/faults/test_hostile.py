"""Damaged and hostile inputs, weights and work directories, and random settings: reduced counts of the scripts."""

import numpy as np
import pytest
import runs

from tests.faults import inputs, settings, workdirs


@pytest.mark.parametrize("kind", inputs.DRAWS)
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_read_or_counted(kind, seed, tmp_path):
    assert inputs.run(kind, seed, tmp_path)["problem"] == ""


def test_every_weight_is_loaded_or_refused_in_one_line():
    status, stdout, stderr = runs.command("tests.faults.weights", "--count=27", "--seed=1000")
    assert status == 0 and "27 inputs of" in stdout and stdout.endswith(" 0 problems\n"), stdout + stderr


@pytest.mark.parametrize("seed", range(12))
def test_every_file_of_a_workdir_is_read_or_named(seed, tmp_path):
    assert set(workdirs.run(seed, tmp_path).values()) <= {"read", "refused"}


@pytest.mark.parametrize("seed", range(15))
def test_a_setting_is_refused_in_one_line_or_planned(seed):
    assert settings.problem(settings.draw(np.random.default_rng(seed)))[1] == ""
