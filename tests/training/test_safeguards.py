"""Steps that are not finite and loss spikes: what is said, counted and written, and when a run stops."""

import json
import math

import numpy as np
import pytest

from infcl_jax.runtime import outputs
from infcl_jax.training import Safeguards


def metrics(finite):
    scalars = dict.fromkeys(("loss", "logit_scale", "grad_norm"), np.float32(1.0))
    return {**scalars, "finite": {"image features": True, "the loss": finite, "the gradient of text": finite}}


def follow(workdir, flags, **options):
    """Check steps whose flags are given, after `start`."""
    steps = Safeguards("skip", workdir=workdir, batch_indices=lambda n: [n, n + 1], **options)
    try:
        for step, finite in enumerate(flags, start=options.get("start", 0) + 1):
            steps.check(step, metrics(finite))
    finally:
        steps.close()
    return steps


def skipped_lines(workdir):
    return [json.loads(line) for line in (workdir / "skipped_batches.jsonl").read_text().splitlines()]


def test_skipped_steps_are_counted_and_their_samples_written(tmp_path, capsys):
    steps = follow(tmp_path, [True, False, True, False], limit=2)
    assert steps.metrics() == {"skipped_steps": 2}
    expected = {"step": 2, "stage": "the loss", "loss": "1.0", "indices": [1, 2]}
    assert skipped_lines(tmp_path) == [expected, {**expected, "step": 4, "indices": [3, 4]}]
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "step 2: skipped",
        "step 4: skipped",
    ]


def test_skipped_steps_in_a_row_stop_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match=r"^3 skipped steps in a row; step 6: the loss became NaN[^\n]*$"):
        follow(tmp_path, [False, False, True, False, False, False, True], limit=3)
    assert len(skipped_lines(tmp_path)) == 5


def test_a_resumed_run_keeps_the_skipped_steps_before_it(tmp_path):
    follow(tmp_path, [False, False, True, False], limit=9)
    assert follow(tmp_path, [False], limit=9, start=2).metrics() == {"skipped_steps": 3}
    assert [line["step"] for line in skipped_lines(tmp_path)] == [1, 2, 3]


def test_with_stop_the_first_step_that_is_not_finite_stops_the_run(tmp_path):
    steps = Safeguards(workdir=tmp_path)
    steps.check(1, metrics(True))
    with pytest.raises(FloatingPointError, match=r"^step 2: the loss became NaN"):
        steps.check(2, metrics(False))
    assert steps.metrics() == {} and list(tmp_path.iterdir()) == []


def spikes(losses):
    """Steps of the lines, and the number of spikes."""
    safeguards, said = Safeguards(), []
    outputs.printers.append(said.append)
    for step, loss in enumerate(losses, start=1):
        safeguards.check(step, {"loss": loss, "finite": {}})
    outputs.printers.remove(said.append)
    assert all("far above" in line for line in said)
    return [int(line.split()[2][:-1]) for line in said], safeguards.metrics().get("loss_spikes", 0)


def noisy(count, level=4.0, width=0.05):
    """Losses that fall slowly, with deterministic noise."""
    return [level - 0.001 * n + width * math.sin(37 * n) for n in range(count)]


def test_noise_is_no_spike():
    assert spikes(noisy(1000)) == spikes(noisy(1000, level=0.1, width=0.01)) == ([], 0)


@pytest.mark.parametrize(("rise", "found"), [(0.1, 0), (0.19, 0), (3.0, 1), (math.nan, 0), (math.inf, 0)])
def test_a_loss_far_above_the_last_ones_is_a_spike(rise, found):
    losses = noisy(60, width=0.001)
    losses[50] += rise
    assert spikes(losses) == ([51] * found, found)


def test_the_rise_counts_in_deviations():
    losses = noisy(60, width=0.5)
    losses[50] += 1.5  # 4 deviations
    assert spikes(losses) == ([], 0)


def test_few_steps_are_no_level():
    assert spikes([4.0] * 19 + [9.0]) == ([], 0)
    assert spikes([4.0] * 20 + [9.0]) == ([21], 1)


def test_repeated_spikes_give_one_line_in_a_hundred_steps():
    losses = noisy(300)
    for step in range(50, 250, 10):
        losses[step - 1] += 5.0
    assert spikes(losses) == ([50, 150], 20)
