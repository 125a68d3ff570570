"""AdamW against PyTorch, and clip_benchmark's search of the weight decay."""

from pathlib import Path

import jax
import numpy as np
import pytest

from infcl_jax.evaluation import adamw_probe
from infcl_jax.evaluation.linear_probe import WEIGHT_DECAYS, train_adamw
from infcl_jax.runtime.mesh import data_mesh

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "linear_probe.npz"))
FEATURES, LABELS = GOLDEN["multinomial/features"], GOLDEN["multinomial/labels"]
SPLITS = [slice(0, 150), slice(150, 190), slice(190, 240)]
TRAIN, VALIDATION, TEST = ((FEATURES[rows], LABELS[rows]) for rows in SPLITS)


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


def test_training_equals_pytorch():
    start = {"weights": GOLDEN["adamw/start/weight"].T, "bias": GOLDEN["adamw/start/bias"]}
    decay = np.float32(GOLDEN["adamw/weight_decay"])
    params = train_adamw(start, TRAIN[0], TRAIN[1].astype(np.int32), GOLDEN["adamw/orders"], decay)
    np.testing.assert_allclose(params["weights"].T, GOLDEN["adamw/after/weight"], atol=1e-5)
    np.testing.assert_allclose(params["bias"], GOLDEN["adamw/after/bias"], atol=1e-5)


def test_probe_searches_with_a_validation_set_only():
    mesh = data_mesh(jax.devices()[:2])
    probe = adamw_probe(*TRAIN, *TEST, validation=VALIDATION, epochs=2, mesh=mesh)
    best = max(probe.validation.values())
    assert probe.validation[probe.model.regularization] == best
    assert set(WEIGHT_DECAYS[::16]) <= set(probe.validation) <= set(WEIGHT_DECAYS)
    assert probe.metrics["top1"] > 0.6
    assert adamw_probe(*TRAIN, *TEST, epochs=2, mesh=mesh).model.regularization == 0


def test_features_are_normalized_and_seeds_matter():
    mesh = data_mesh(jax.devices()[:1])
    probes = [
        adamw_probe(factor * TRAIN[0], TRAIN[1], *TEST, weight_decay=0.1, seed=seed, mesh=mesh)
        for factor, seed in [(1, 0), (4, 0), (1, 1)]
    ]
    first, scaled, other = (probe.model.weights for probe in probes)
    np.testing.assert_array_equal(scaled, first)
    assert np.abs(other - first).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"), [({"epochs": 0}, "epochs >= 1"), ({"weight_decay": -1.0}, "finite weight_decay >= 0")]
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        adamw_probe(*TRAIN, *TEST, **changes)
