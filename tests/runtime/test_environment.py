"""Environment of each start of a run."""

import json

import jax
import pytest

from infcl_jax.runtime.environment import ENVIRONMENT_FILE, record_start

COMPONENTS = {"state and batch": 3, "temporaries": 4}


def test_starts_are_appended(tmp_path):
    for step, components in ((0, {}), (3, COMPONENTS)):
        record_start(tmp_path, step, components, 1 << 30)
    starts = json.loads((tmp_path / ENVIRONMENT_FILE).read_text())
    assert [start["step"] for start in starts] == [0, 3]
    assert starts[0]["jax"] == jax.__version__ and starts[0]["processes"] == "1"
    plans = [start["memory_plan"] for start in starts]
    assert plans[0] == {"components": {}, "peak": None, "limit": 1 << 30}
    assert plans[1] == {"components": COMPONENTS, "peak": 7, "limit": 1 << 30}
    assert [path.name for path in tmp_path.iterdir()] == [ENVIRONMENT_FILE]


@pytest.mark.parametrize("content", ["[{", '"text"'])
def test_a_damaged_file_is_started_anew(tmp_path, content):
    (tmp_path / ENVIRONMENT_FILE).write_text(content)
    record_start(tmp_path, 5, {}, None)
    assert [start["step"] for start in json.loads((tmp_path / ENVIRONMENT_FILE).read_text())] == [5]
