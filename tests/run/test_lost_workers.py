import pytest

from infcl_jax.data.workers import WorkerLost
from infcl_jax.run.batches import LOST_WORKERS_FILE, LostWorkers
from infcl_jax.runtime.exit_codes import RESUME, Interrupted
from infcl_jax.runtime.outputs import Outputs

KILLED = WorkerLost("data worker 1 of 2 was killed (SIGKILL)", killed=True)


@pytest.mark.parametrize(
    ("passed", "second", "again"),
    [
        (None, (10, 12), True),
        (None, (8, 10), True),  # the worker had read less
        (None, (7, 9), False),
        (None, (13, 15), False),
        (11, (10, 12), True),
        (12, (10, 12), False),
    ],
)
def test_a_loss_at_the_same_step_is_an_error_unless_the_run_has_passed_it(tmp_path, passed, second, again):
    first = LostWorkers(tmp_path, Outputs()).end(KILLED, 10, 12)
    assert isinstance(first, Interrupted) and first.code == RESUME and "step 10, the same command" in str(first)
    if passed is not None:
        LostWorkers(tmp_path, Outputs()).passed(passed)
    end = LostWorkers(tmp_path, Outputs()).end(KILLED, *second)
    assert isinstance(end, WorkerLost if again else Interrupted) and str(KILLED) in str(end)


def test_the_file_is_removed_once_all_losses_are_passed(tmp_path):
    lost = LostWorkers(tmp_path, Outputs())
    for first, last in ((10, 12), (20, 22)):
        lost.end(KILLED, first, last)
    for step, exists in ((12, True), (22, False)):
        lost.passed(step)
        assert (tmp_path / LOST_WORKERS_FILE).exists() == exists


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[["a", 2]]', "[[1, 2, 3]]", "[[1, null]]"])
def test_a_damaged_file_counts_as_absent(tmp_path, content):
    (tmp_path / LOST_WORKERS_FILE).write_text(content)
    assert isinstance(LostWorkers(tmp_path, Outputs()).end(KILLED, 1, 2), Interrupted)


def test_other_ends_are_errors_at_once(tmp_path):
    error = WorkerLost("data worker 1 of 2 ended with exit status 3", killed=False)
    assert LostWorkers(tmp_path, Outputs()).end(error, 1, 2) is error and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_does_not_keep_the_run_from_ending(tmp_path, capsys):
    assert isinstance(LostWorkers(tmp_path / "missing", Outputs()).end(KILLED, 1, 2), Interrupted)
    assert "cannot write" in capsys.readouterr().out
