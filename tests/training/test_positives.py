"""Positives by id in training: data, step, metric and settings."""

import numpy as np
import optax
import oracle
import pytest
import runs

from infcl_jax import clip_loss, run
from infcl_jax.data.positive_ids import image_id, normalized, positive_id
from infcl_jax.losses.base import Targets
from infcl_jax.models import CLIPOutput
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.settings import check_config
from infcl_jax.training import GradCacheConfig, create_state, make_loss, make_train_step


def groups(rows):
    """Bool `[b, b]`, True for equal rows."""
    return np.array([[np.array_equal(a, b) for b in rows] for a in rows])


@pytest.mark.parametrize("same", [" A  dog", "a\tDOG ", "\uff41 dog"])
def test_captions_are_compared_in_normal_form(same):
    assert normalized(same) == "a dog"
    first, second = (positive_id("caption", {}, caption) for caption in ("a dog", same))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, positive_id("caption", {}, "a dog."))


def test_ids_are_the_same_on_every_machine():
    np.testing.assert_array_equal(image_id(b"abc"), [-669729832, 1502991667])
    assert image_id(b"abc").dtype == np.int32


def test_a_sample_without_class_has_no_label_id():
    np.testing.assert_array_equal(positive_id("label", {"label": 7}, ""), [0, 7])
    with pytest.raises(ValueError, match="a class for every sample"):
        positive_id("label", {"label": -1}, "")


@pytest.mark.parametrize("positives", ["caption", "image", "label"])
def test_batches_have_the_ids_of_their_samples(positives):
    config, mesh = runs.config(positives=positives), oracle.mesh_of(1)
    source = run.training_source(config)
    data = run.training_data(config, source, mesh=mesh)
    batch = run.next_batch(config, data, mesh)
    data.close()
    ids = np.asarray(batch["ids"])
    assert ids.shape == (32, 2) and ids.dtype == np.int32
    expected = runs.token_ids(batch["text"])  # equal captions have equal tokens
    if positives == "caption":
        np.testing.assert_array_equal(groups(ids), groups(expected))
    elif positives == "label":
        assert set(ids[:, 1]) <= set(range(10)) and groups(ids).sum() > groups(expected).sum()
    else:
        np.testing.assert_array_equal(groups(ids), np.eye(32, dtype=bool))


@pytest.mark.parametrize("cache", [{}, {"chunk_size": 8, "offload": "host"}])
def test_a_step_counts_the_extra_positives(cache):
    config = runs.config(positives="caption", **{f"grad_cache.{name}": value for name, value in cache.items()})
    mesh = oracle.mesh_of(4)
    source = run.training_source(config)
    data = run.training_data(config, source, mesh=mesh)
    batch = run.next_batch(config, data, mesh)
    data.close()
    loss = run.loss(config, mesh, source)
    step = make_train_step(loss, 0, GradCacheConfig(**config.grad_cache), mesh)
    state = create_state(runs.model(), optax.sgd(1e-2), runs.SIDE, runs.CONTEXT, 0, mesh)
    _, metrics = step(state, batch)
    assert float(metrics["extra_positives"]) == groups(np.asarray(batch["ids"])).sum() - 32 > 0
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("multi_positive", ["mean", "any"])
def test_the_training_loss_is_the_function(multi_positive):
    image, text = oracle.features("random", 8, 8, 33)
    ids = np.random.default_rng(0).integers(0, 5, (8, 2)).astype(np.int32)
    targets = Targets("caption", multi_positive, 0.1)
    loss = make_loss("clip", oracle.mesh_of(4), targets=targets)
    output = CLIPOutput(image, text, np.float32(10), None)
    expected = clip_loss(
        image, text, 10.0, image_ids=ids, text_ids=ids, multi_positive=multi_positive, label_smoothing=0.1
    )
    assert loss.batch_inputs == ("ids",)
    assert float(loss(output, ids=ids).value) == pytest.approx(float(expected), rel=1e-6)


def test_a_batch_without_ids_is_an_error():
    mesh = oracle.mesh_of(1)
    loss = make_loss("clip", mesh, targets=Targets("caption"))
    state = create_state(runs.model(), optax.sgd(1e-2), runs.SIDE, runs.CONTEXT, 0, mesh)
    with pytest.raises(ValueError, match="a batch with ids for positives='caption', got none"):
        make_train_step(loss, 0, mesh=mesh)(state, shard_batch(mesh, runs.batch(8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "sogclr", "positives": "caption"}, "expected positives='pair' with loss='sogclr'"),
        ({"loss": "siglip", "label_smoothing": 0.1}, "expected label_smoothing=0.0 with loss='siglip'"),
        ({"multi_positive": "any"}, "expected multi_positive='mean' with loss='clip' and positives='pair'"),
        (
            {"positives": "image", "grad_cache.chunk_size": 8, "grad_cache.offload": "replay"},
            "'none' or 'host' with positives='image'",
        ),
    ],
)
def test_settings_without_effect_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(runs.config(**changes))
