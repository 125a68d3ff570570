"""LiT and fine-tuning on image towers of OpenCLIP (tests/golden/make_open_clip_models.py)."""

import functools
import shutil

import jax
import numpy as np
import pytest
import runs
from flax.traverse_util import flatten_dict
from open_clip_folder import open_clip_folder

import infcl_jax
from infcl_jax import run, train
from infcl_jax.models import load_pretrained
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.training import (
    METRICS_FILE,
    Checkpointer,
    GradCacheConfig,
    Preemption,
    make_train_step,
    read_metrics,
    restore_variables,
)
from infcl_jax.training.frozen import PrecomputedFeatures

STEPS, STOP, DECAY = 4, 2, 0.9
# By tower; with batch normalization, gradient caching has another pass for the running statistics.
CACHES = {"vit": {}, "resnet": {"grad_cache.chunk_size": 16}}
CASES = ["vit", pytest.param("resnet", marks=pytest.mark.full)]
LOCKED_ONLY = (("visual/conv1/.*", 0.1), (".*", 1.0))


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """optax's Adam mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def weights(case, tmp_path_factory):
    return open_clip_folder(case, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def converted(weights):
    return flat(load_pretrained(weights, compare_features=False)[1])


@pytest.fixture(scope="module")
def lit(case, weights, tmp_path_factory):
    """Work directory of an uninterrupted run with a locked image tower."""
    workdir = tmp_path_factory.mktemp("lit")
    train(settings(case, weights), workdir)
    return workdir


def settings(case, weights, **changes):
    """Settings of a LiT run on the digits."""
    fixed = {
        "model": str(weights),
        "model_overrides": f"text.context_length={runs.CONTEXT}",
        "init.image": str(weights),
        "frozen": ("image",),
        "total_steps": STEPS,
        "augmentation.scale": (1.0, 1.0),
        "num_workers": 0,
        "num_threads": 1,
        "evaluation.retrieval_dataset": None,
        "evaluation.zero_shot_dataset": None,
    }
    return runs.config(**(fixed | CACHES[case] | changes))


def flat(variables):
    """Image tower by name."""
    flat = {name: np.asarray(array) for name, array in flatten_dict(jax.device_get(variables), sep="/").items()}
    return {name: array for name, array in flat.items() if name.split("/")[1] == "visual"}


def losses(workdir):
    return [line["loss"] for line in read_metrics(workdir / METRICS_FILE)]


def test_the_tower_stays_the_converted_one(case, weights, converted, lit):
    config = settings(case, weights)
    _, trained = restore_variables(lit, jax.eval_shape(lambda: run.initial_state(config, data_mesh()).variables))
    trained = flat(trained)
    assert trained.keys() == converted.keys()
    assert any(name.startswith("batch_stats/") for name in trained) == (case == "resnet")
    for name, array in converted.items():
        assert trained[name].tobytes() == array.tobytes(), name
    assert len(set(losses(lit))) == STEPS  # the text tower is trained


def test_its_features_are_those_of_the_converted_model(weights, lit):
    images = list(np.random.default_rng(0).integers(0, 256, (9, 40, 36, 3), dtype=np.uint8))
    expected, got = (infcl_jax.load(path, batch_size=8).encode_images(images) for path in (weights, lit))
    assert got.tobytes() == expected.tobytes() and np.ptp(got, axis=0).min() > 0


def test_the_tower_is_encoded_once(case, weights):
    """Images in place of features add the operations of one forward pass."""
    chunks = {"grad_cache.chunk_size": 16}
    config, mesh = settings(case, weights, **chunks), data_mesh(jax.devices()[:1])
    model = infcl_jax.load(weights).model
    side, rows = model.visual.image_size, config.batch_size
    batch = {
        "image": np.zeros((rows, side, side, 3), np.uint8),
        "text": np.zeros((rows, runs.CONTEXT), np.int32),
    }
    features = PrecomputedFeatures(np.zeros((rows, 8), model.feature_dtype))

    def operations(function, *arguments):
        text = function.lower(*arguments).as_text()
        return text.count("stablehlo.dot_general") + text.count("stablehlo.convolution")

    def step_operations(batch, **changes):
        config = settings(case, weights, **chunks | changes)
        state = jax.eval_shape(lambda: run.initial_state(config, mesh))
        step = make_train_step(run.loss(config, mesh), 0, GradCacheConfig(**config.grad_cache), mesh)
        return operations(step, state, batch), state

    locked, state = step_operations(batch)
    precomputed, _ = step_operations(batch | {"image": features})
    unlocked, _ = step_operations(batch, frozen=())
    encode = jax.jit(functools.partial(state.apply_fn, method="encode_image"))
    forward = operations(encode, state.variables, batch["image"])
    assert locked - precomputed == forward > 0
    assert unlocked - precomputed > 3 * forward


def test_cached_features_give_the_same_losses_also_after_a_stop(case, weights, lit, tmp_path, monkeypatch):
    """The resumed run reads neither the weights nor the images again."""
    moved = shutil.copytree(weights, tmp_path / "weights")
    config, workdir = settings(case, moved, cache_frozen="workdir"), tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=f"saved step {STOP};"):
        patch.setattr(Preemption, "noticed", lambda _, step: step == STOP)
        train(config, workdir)
    (moved / "open_clip_model.safetensors").unlink()
    train(config, workdir)
    assert losses(workdir) == losses(lit)


def test_fine_tuning_starts_at_the_converted_tower(case, weights, converted, tmp_path):
    """After a step, the moving averages are between the converted and the trained parameters."""
    changes = {
        "total_steps": 1,
        "unlocked_groups.image": 2,
        "ema_decay": DECAY,
        "optimizer.layer_decay": (0.5, 1.0),
        "optimizer.learning_rate_rules": LOCKED_ONLY,
    }
    config = settings(case, weights, **changes)
    train(config, tmp_path)
    with Checkpointer(tmp_path) as checkpoints:
        state = checkpoints.restore_latest(run.initial_state(config, data_mesh()))
    trained, averages = flat(state.variables), flat(state.ema)
    moved = {name for name, array in trained.items() if not np.array_equal(array, converted[name])}
    parameters = {name for name in moved if name.startswith("params/")}
    assert parameters and not {name.removeprefix("params/") for name in parameters} & state.frozen
    assert all("layer4_0/" in name for name in moved - parameters)
    assert bool(moved - parameters) == (case == "resnet")
    for name, mean in averages.items():
        expected = DECAY * converted[name] + (1 - DECAY) * trained[name]
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-7, err_msg=name)
    assert moved <= averages.keys()
