"""The profiled steps, and faults of the profiler."""

import jax
import jax.numpy as jnp
import pytest

from infcl_jax.training import Profile


def run(steps, workdir, said, first=1, last=6, **options):
    with Profile(steps, workdir, say=said.append, **options) as profile:
        for step in range(first, last + 1):
            profile.start(step)
            metrics = {"loss": jnp.float32(step) + 1}
            profile.stop(step, metrics)


def test_a_trace_is_written_with_a_line_that_says_where(tmp_path):
    said = []
    run((3, 4), tmp_path, said)
    (trace,) = tmp_path.glob("profile/plugins/profile/*/*.trace.json.gz")
    assert trace.stat().st_size > 0
    (line,) = said
    assert line.startswith(f"profile of steps 3 to 4: tensorboard --logdir={tmp_path / 'profile'} ")


@pytest.mark.parametrize(
    ("steps", "first", "last", "lead", "events"),
    [
        ((3, 4), 1, 6, True, ["start 3", "stop 4", "profile of steps 3 to 4"]),
        ((3, 3), 1, 6, True, ["start 3", "stop 3", "profile of steps 3 to 3"]),
        ((1, 4), 3, 6, True, ["start 3", "stop 4", "profile of steps 3 to 4"]),  # resumed inside
        ((3, 9), 1, 6, True, ["start 3", "stop 6", "profile of steps from 3 on"]),  # the run stops inside
        ((3, 4), 5, 6, True, []),
        ((), 1, 6, True, []),
        ((3, 4), 1, 6, False, []),
    ],
)
def test_the_traced_steps_are_those_of_the_window(tmp_path, monkeypatch, steps, first, last, lead, events):
    happened, now = [], [first - 1]
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: happened.append(f"start {now[0] + 1}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: happened.append(f"stop {now[0]}"))
    with Profile(steps, tmp_path, lead=lead, say=lambda line: happened.append(line.split(":")[0])) as profile:
        for step in range(first, last + 1):
            profile.start(step)
            now[0] = step
            profile.stop(step, {})
    assert happened == events


def test_a_profiler_that_fails_is_one_line(tmp_path, monkeypatch):
    def refuse(folder):
        raise RuntimeError("Profile has already been started.\nOnly one")

    said = []
    monkeypatch.setattr(jax.profiler, "start_trace", refuse)
    run((3, 4), tmp_path, said)
    assert said == [f"warning: no profile in {tmp_path / 'profile'}: Profile has already been started. Only one"]
