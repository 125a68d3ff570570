"""The smallest run: its model, batches and configuration, and commands as processes."""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from configs import base
from infcl_jax import run
from infcl_jax.models import RESIDUAL, CLIPOutput, build_model, l2_normalize, model_config
from infcl_jax.ops.packing import PackedTokens
from infcl_jax.planner import Workload
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.training import (
    METRICS_FILE,
    Checkpointer,
    GradCacheConfig,
    TrainState,
    prepare_workdir,
    read_metrics,
    save_config,
)

ROOT = Path(__file__).resolve().parents[1]
CACHE = ("JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_", "JAX_ENABLE_COMPILATION_CACHE")

SIDE, CONTEXT = 16, 36  # every caption of the digits is whole
MODEL = {
    "embed_dim": 16,
    "vision.width": 16,
    "vision.layers": 1,
    "vision.image_size": SIDE,
    "text.width": 16,
    "text.layers": 1,
    "text.context_length": CONTEXT,
}
OVERRIDES = ",".join(f"{name}={value}" for name, value in MODEL.items())
# Settings of `infcl_jax.train` for the smallest run on the digits.
SMALL = {"dataset": "digits", "model": "tiny", "model_overrides": OVERRIDES, "batch_size": 32, "cpu_devices": 1}
SMALL |= {"optimizer": {"warmup_steps": 0}}


def model(**changes):
    return build_model(model_config("tiny", **(MODEL | changes)))


def token_ids(texts):
    """Token ids [b, t] of the texts of a batch, packed or not."""
    return np.asarray(texts.tokens if isinstance(texts, PackedTokens) else texts)


class Linear(nn.Module):
    """Smallest dual encoder with a real one's parameters and methods; it compiles fast."""

    init_logit_scale: float = 2.0
    init_logit_bias: float | None = -3.0

    def setup(self):
        self.visual, self.text = nn.Dense(8), nn.Embed(259, 8)
        self.logit_scale = self.param("logit_scale", nn.initializers.constant(self.init_logit_scale), (), jnp.float32)
        initial_bias = nn.initializers.constant(self.init_logit_bias or 0.0)
        self.logit_bias = self.param("logit_bias", initial_bias, (), jnp.float32)

    def __call__(self, image, text, *, train=False):
        return CLIPOutput(self.encode_image(image), self.encode_text(text), *self.logit_scale_and_bias())

    def encode_image(self, image, *, train=False):
        pixels = image.reshape(len(image), -1).astype(jnp.float32) / 255
        return l2_normalize(checkpoint_name(self.visual(pixels), RESIDUAL), "float32")

    def encode_text(self, text, *, train=False):
        return l2_normalize(checkpoint_name(self.text(text).mean(axis=1), RESIDUAL), "float32")

    def logit_scale_and_bias(self):
        return jnp.exp(self.logit_scale), None if self.init_logit_bias is None else self.logit_bias


ADAM = optax.adamw(1e-3)
CACHE_SETTINGS = {field.name for field in dataclasses.fields(GradCacheConfig)}


def workload(**changes) -> Workload:
    """The smallest run for the planner, with changed settings of its own and of its gradient caching."""
    cache = GradCacheConfig(**{name: changes.pop(name) for name in CACHE_SETTINGS & changes.keys()})
    return Workload(**({"model": model(), "optimizer": ADAM, "batch_size": 64, "cache": cache} | changes))


def batch(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    text = rng.integers(1, 257, (rows, CONTEXT), dtype=np.int32)
    text[:, 0], text[:, -1] = 257, 258
    return {"image": rng.integers(0, 256, (rows, SIDE, SIDE, 3), dtype=np.uint8), "text": text}


def config(**changes):
    """Configuration on the digits whose optimizer moves every parameter from the first step."""
    config = base.get_config()
    config.update(
        dataset="digits",
        model="tiny",
        model_overrides=OVERRIDES,
        batch_size=32,
        total_steps=6,
        log_every=1,
        eval_every=0,
        checkpoint_every=0,
        optimizer={"warmup_steps": 0, "clip_norm": 1.0},
        evaluation={
            "batch_size": 64,
            "retrieval_dataset": "digits",
            "gallery": 10,  # whose captions all differ
            "zero_shot_dataset": "digits",
            "zero_shot_split": "zero_shot",
        },
    )
    config.update_from_flattened_dict(changes)
    return config


class NoData:
    """Data iterator without data or a position."""

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


def save(workdir: Path, factors: dict[int, float]) -> dict[int, TrainState]:
    """Save a run on one device whose checkpoint of each step has the initial parameters times a factor."""
    initial = run.initial_state(config(), data_mesh(jax.devices()[:1]))
    params = {
        step: jax.tree.map(lambda x, factor=factor: x * factor, initial.params) for step, factor in factors.items()
    }
    states = {step: initial.replace(params=value) for step, value in params.items()}
    save_config(prepare_workdir(workdir), config().to_dict())
    with Checkpointer(workdir) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, NoData())
    return states


def start(module: str, *arguments: str, start_new_session: bool = False, **environ: str) -> subprocess.Popen:
    """Start `python -m module` from the repository's root with fast compilation.

    It shares this process's compilation cache, and so leaves the user's alone.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=_environment() | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )


def start_cluster(processes: int, module: str, *arguments: str, **environ: str) -> list[subprocess.Popen]:
    """Start one command as several processes of one `jax.distributed` cluster."""
    cluster = {"COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "NUM_PROCESSES": str(processes)} | environ
    return [start(module, *arguments, PROCESS_ID=str(rank), **cluster) for rank in range(processes)]


class Finished(NamedTuple):
    """Exit status and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def finish(*processes: subprocess.Popen, seconds: float = 240) -> list[Finished]:
    """Wait for processes, each for at most `seconds`; none survives."""
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Finished(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def history(workdir: Path) -> tuple[list[dict], list[dict]]:
    """Read training and evaluation metrics without the times."""
    lines = read_metrics(workdir / METRICS_FILE)
    times = ("time", "seconds", "examples_per_second", "data/wait_fraction")
    timeless = [{k: v for k, v in line.items() if k not in times} for line in lines]
    return [line for line in timeless if "loss" in line], [line for line in timeless if "loss" not in line]


def command(module: str, *arguments: str, cpu_devices: int | None = None, seconds: int = 240) -> Finished:
    """Run `python -m module` like `start`, but as a fork.

    The forked process has imported the packages of the commands.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in output:
            path.touch()
        request = {"module": module, "arguments": arguments, "output": list(map(str, output))}
        request |= {"cpu_devices": cpu_devices, "seconds": seconds}
        server = _fork_server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return Finished(int(server.stdout.readline()), *(path.read_text() for path in output))


@functools.cache
def _fork_server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "fork_server.py")],
        cwd=ROOT,
        env=_environment() | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # closes its stdin, which ends it
    return server


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return inherited | settings | {name: value for name, value in os.environ.items() if name.startswith(CACHE)}


def flags(settings) -> list[str]:
    """The command-line flags that turn `configs/base.py` into `settings`."""
    default = base.get_config()
    changed = []
    for name, value in flat(settings).items():
        if value != flat(default)[name]:
            changed.append(f"--config.{name}={value}")
    return ["--config=configs/base.py", *changed]


def flat(config, prefix=""):
    """The settings of a configuration by dotted name."""
    settings = {}
    for name, value in config.items():
        settings |= flat(value, f"{prefix}{name}.") if hasattr(value, "items") else {f"{prefix}{name}": value}
    return settings


def free_port() -> int:
    """A port below the ephemeral range, so that no other process is assigned it."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def equal_bits(a, b) -> bool:
    """True if two trees hold the same arrays bit for bit, NaN included."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(_bits(x) == _bits(y) for x, y in pairs)


def _bits(array):
    array = np.asarray(array)
    return array.dtype, array.shape, array.tobytes()
