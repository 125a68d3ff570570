"""Many saves in one process, and the report of a soak."""

import os
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import runs

from infcl_jax.training import Checkpointer
from tests.faults import soak


def save(checkpoints, steps):
    """Save tiny states; return the usage of this process after the last write."""
    for step in steps:
        params = {"kernel": jnp.full((8, 8), step, jnp.float32)}
        others = dict.fromkeys(("opt_state", "batch_stats", "samples", "ema"))
        checkpoints.save(step, SimpleNamespace(step=jnp.asarray(step), params=params, **others), runs.NoData())
    checkpoints.wait()
    return soak.usage(os.getpid())


@pytest.mark.slow
def test_saves_leave_no_descriptors_threads_or_memory(tmp_path):
    """Half of the 70 KiB a save that a run with TensorStore 0.1.86 leaks."""
    with Checkpointer(tmp_path) as checkpoints:
        first, last = save(checkpoints, range(20)), save(checkpoints, range(20, 80))
    # Fewer than one in two saves: pools of threads grow to their size at any time.
    assert last.descriptors - first.descriptors < 30 and last.threads - first.threads < 30
    assert (last.rss - first.rss) / 60 < 35, "KiB per save"


def samples(growth=0.0, descriptors=20, threads=30):
    """Samples of one hour, whose memory grows by `growth` MiB a minute."""
    for number in range(1800):
        minutes = number / 30
        last = number == 1799
        noise = 512 * (number % 7)
        rss = 500_000 + int(growth * 1024 * minutes) + noise
        yield soak.Sample(60 * minutes, 20 * number, rss, 9000, descriptors + last, threads + number // 400, 2)


@pytest.mark.parametrize(
    ("changes", "growing"),
    [({"growth": 0.9}, ["threads grow by at least 3"]), ({"growth": 1.2}, ["the memory of process", "threads grow"])],
)
def test_the_report_names_what_grows(changes, growing, capsys):
    lines = soak.report(list(samples(**changes)), most=1.0)
    assert len(lines) == len(growing) and all(map(str.startswith, lines, growing))
    assert f"process: {changes['growth']:.2f} MiB/min" in capsys.readouterr().out
