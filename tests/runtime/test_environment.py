"""Environment of each start of a run."""

import json

import jax
import pytest
import runs

from infcl_jax.planner import plan_memory
from infcl_jax.runtime.environment import ENVIRONMENT_FILE, record_start


@pytest.fixture(scope="module")
def plan():
    return plan_memory(runs.workload(), memory_limit=1 << 30)


def test_starts_are_appended(tmp_path, plan):
    for step in (0, 3):
        record_start(tmp_path, step, plan)
    starts = json.loads((tmp_path / ENVIRONMENT_FILE).read_text())
    assert [start["step"] for start in starts] == [0, 3]
    assert starts[0]["jax"] == jax.__version__ and starts[0]["processes"] == "1"
    memory = starts[1]["memory_plan"]
    assert (memory["peak"], memory["limit"]) == (plan.peak, 1 << 30)
    assert memory["components"]["parameters"] == plan.parameters and sum(memory["components"].values()) >= plan.peak
    assert [path.name for path in tmp_path.iterdir()] == [ENVIRONMENT_FILE]


@pytest.mark.parametrize("content", ["[{", '"text"'])
def test_a_damaged_file_is_started_anew(tmp_path, plan, content):
    (tmp_path / ENVIRONMENT_FILE).write_text(content)
    record_start(tmp_path, 5, plan)
    assert [start["step"] for start in json.loads((tmp_path / ENVIRONMENT_FILE).read_text())] == [5]
