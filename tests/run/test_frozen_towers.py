"""Training on cached features: the losses of training on images and texts, bit for bit."""

import contextlib
import functools

import jax
import numpy as np
import oracle
import pytest
import runs

from infcl_jax import run
from infcl_jax.planner import plan_memory
from infcl_jax.run.base import make_run
from infcl_jax.settings import make_config

STEPS = 3
CHUNKS = {"grad_cache.chunk_size": 16}
PADDED = {"text_packing": "off"}


@pytest.fixture(scope="module", autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


def config(frozen, **changes):
    fixed = {"frozen": (frozen,), "augmentation.scale": (1.0, 1.0), "num_workers": 0, "num_threads": 1}
    return runs.config(**fixed, **changes)


@functools.cache
def source():
    return run.training_source(config("image"))


def losses(config, workdir, devices):
    built, values = make_run(make_config(config), oracle.mesh_of(devices), source()), []
    state = built.init.create()
    with contextlib.closing(built.training_data(workdir, state, print)) as data:
        for _ in range(STEPS):
            state, metrics = built.step(state, built.next_batch(data))
            values.append(jax.device_get(metrics["loss"]))
    return np.array(values)


@pytest.mark.parametrize(
    ("frozen", "devices", "cache"),
    [
        ("image", 1, {}),
        ("text", 8, PADDED),
        ("image", 8, CHUNKS),
        pytest.param("text", 1, CHUNKS | PADDED | {"grad_cache.offload": "host"}, marks=pytest.mark.full),
        pytest.param("image", 1, CHUNKS | {"grad_cache.offload": "replay"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_losses_have_the_same_bits(tmp_path, frozen, devices, cache):
    expected = losses(config(frozen, **cache), tmp_path, devices)
    assert not (tmp_path / "features").exists()
    got = losses(config(frozen, cache_frozen="workdir", **cache), tmp_path, devices)
    assert [folder.name.partition("-")[0] for folder in (tmp_path / "features").iterdir()] == [frozen]
    assert len(set(expected.tolist())) == STEPS  # the other tower is trained
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unlocked_groups.image": 1}, "expected a frozen tower without unlocked groups with cache_frozen='workdir'"),
        ({"augmentation.scale": (1.0, 1.0), "augmentation.flip": 0.5}, "got augmentation.flip=0.5; set .*flip=0.0$"),
        ({"augmentation.scale": (0.5, 1.0)}, r"set augmentation.scale=\(1.0, 1.0\)$"),
    ],
    ids=str,
)
def test_what_cannot_be_cached_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run.workload(runs.config(**({"frozen": ("image",), "cache_frozen": "workdir"} | changes)), 1)


def test_the_plan_leaves_out_the_images():
    encoded = plan_memory(run.workload(config("image"), 1))
    cached = plan_memory(run.workload(config("image", cache_frozen="workdir"), 1))
    assert encoded.batch - cached.batch == 32 * (3 * runs.SIDE**2 - 4 * runs.MODEL["embed_dim"])
    assert (cached.optimizer, cached.stored) == (encoded.optimizer, encoded.stored)
