"""Damaged and hostile weights and configurations, a reduced count of `python -m tests.faults.weights`."""

import runs


def test_every_input_is_loaded_or_refused_in_one_line():
    status, stdout, stderr = runs.command("tests.faults.weights", "--count=27", "--seed=1000")
    assert status == 0 and "27 inputs of" in stdout and stdout.endswith(" 0 problems\n"), stdout + stderr
