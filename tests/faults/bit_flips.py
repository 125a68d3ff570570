"""Damage single files of a checkpoint and restore it: flipped bits, truncations, removed files.

python -m tests.faults.bit_flips --count=500

Each trial damages one file of the newer of two checkpoints. Half of the files are drawn with weights proportional to
their sizes, half uniformly. "noticed": one line names the file, and the older checkpoint is restored bit for bit.
"""

import argparse
import collections
import random
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from infcl_jax.training import Checkpointer, TrainState

FAULTS = ("flipped bit", "truncated", "removed")
NOTICED, IDENTICAL, DIFFERENT, FAILED = "noticed", "silent, identical", "silent, different", "traceback"


class Data:
    """Iterator reduced to its position."""

    def __init__(self, position: int = 0):
        self.position = position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def train_state(rng):
    """Draw the parameters of a small state."""
    params = {name: {"kernel": rng.normal(size=(32, 32)).astype(np.float32)} for name in ("visual", "text")}
    state = TrainState.create(apply_fn=None, params=jax.device_put(params), tx=optax.adam(1e-3))
    return state.replace(step=jnp.int32(0))


def same_parameters(state, other):
    """Compare parameters bit for bit."""
    pair = jax.device_get((state.params, other.params))
    return jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), *pair))


def run_with_two_checkpoints(workdir):
    """Save steps 1 and 2 with different parameters and return their states."""
    rng = np.random.default_rng(0)
    states = {step: train_state(rng) for step in (1, 2)}
    with Checkpointer(workdir) as checkpoints:
        for step, value in states.items():
            checkpoints.save(step, value, Data(step))
    return states


def damage(path, fault, rng):
    """Damage a file in place."""
    content = bytearray(path.read_bytes())
    if fault == "removed":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


def outcome(workdir, states, name):
    """Restore a run with a damaged file of step 2 and classify the outcome."""
    lines, data = [], Data()
    try:
        with Checkpointer(workdir, say=lines.append) as checkpoints:
            restored = checkpoints.restore_latest(states[1], data)
    except Exception as error:  # any exception is the outcome
        return f"{FAILED} ({type(error).__name__})"
    same = {step: same_parameters(restored, state) for step, state in states.items()}
    if same[2] and data.position == 2:
        return IDENTICAL
    named = len(lines) == 1 and "\n" not in lines[0] and name in lines[0]
    return NOTICED if same[1] and data.position == 1 and named else DIFFERENT


def count_outcomes(count, seed=0):
    """Count the outcomes by fault: `count` flipped bits, a fifth as many of the others."""
    rng, outcomes = random.Random(seed), {fault: collections.Counter() for fault in FAULTS}
    with tempfile.TemporaryDirectory() as workdir:
        states = run_with_two_checkpoints(workdir)
        folder = Path(workdir, "checkpoints", "2")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in files]
        for fault in FAULTS:
            for trial in range(count if fault == FAULTS[0] else -(-count // 5)):
                path = rng.choices(files, sizes if trial % 2 else None)[0]
                content = path.read_bytes()
                damage(path, fault, rng)
                outcomes[fault][outcome(workdir, states, str(path.relative_to(folder)))] += 1
                path.write_bytes(content)
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--count", type=int, default=500, help="flipped bits; a fifth as many truncated and removed files"
    )
    arguments, start = parser.parse_args(), time.monotonic()
    results = count_outcomes(arguments.count)
    for fault, outcomes in results.items():
        print(f"{fault}: {dict(outcomes)}")
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(any(set(outcomes) - {NOTICED} for outcomes in results.values()))
