"""The loss of a whole split against the dense definition in float64."""

import jax
import numpy as np
import pytest

from infcl_jax.evaluation import batch_loss, contrastive, split_loss
from infcl_jax.runtime.mesh import data_mesh


def pairs(samples, dim=12, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(samples, dim))
    text = image + rng.normal(size=(samples, dim))
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (image, text)]
    return unit[0].astype(np.float32), unit[1].astype(np.float32)


def dense_loss(image, text, scale):
    logits = scale * image.astype(np.float64) @ text.astype(np.float64).T
    positive = np.diag(logits)
    rows, columns = (np.logaddexp.reduce(logits, axis=axis) for axis in (1, 0))
    return float(np.mean(rows + columns - 2 * positive) / 2)


@pytest.mark.parametrize(("devices", "samples", "scale"), [(1, 13, 1.0), (8, 101, 100.0), (8, 1, 1.0)])
def test_equals_the_dense_loss(devices, samples, scale):
    image, text = pairs(samples)
    loss = split_loss(image, text, scale, data_mesh(jax.devices()[:devices]))
    assert isinstance(loss, float)
    assert loss == pytest.approx(dense_loss(image, text, scale), rel=1e-5, abs=1e-5)


def test_the_loss_of_batches_is_the_mean_of_their_dense_losses():
    image, text = pairs(20)
    rows = np.random.default_rng(0).permutation(20)
    expected = np.mean([dense_loss(image[r], text[r], 20.0) for r in (rows[:8], rows[8:16])])
    assert batch_loss(image, text, 20.0, data_mesh(), 8) == pytest.approx(expected, rel=1e-5)
    assert batch_loss(image, text, 20.0, data_mesh(), 20) == pytest.approx(dense_loss(image, text, 20.0), rel=1e-5)


@pytest.mark.parametrize("batch_size", [0, 21])
def test_batches_have_at_most_all_pairs(batch_size):
    with pytest.raises(ValueError, match=f"expected 1 <= batch_size <= 20 pairs of the split, got {batch_size}"):
        batch_loss(*pairs(20), 20.0, data_mesh(), batch_size)


def test_the_loss_is_computed_on_the_mesh_by_the_implementation_asked_for(monkeypatch):
    seen, clip_loss = [], contrastive.clip_loss

    def recorded(*arrays, **options):
        seen.append(options)
        return clip_loss(*arrays, **options)

    monkeypatch.setattr(contrastive, "clip_loss", recorded)
    image, text = pairs(23)
    mesh = data_mesh()
    assert split_loss(image, text, 5.0, mesh, "dense") == pytest.approx(dense_loss(image, text, 5.0), rel=1e-5)
    assert (seen[0]["mesh"], seen[0]["implementation"]) == (mesh, "dense")


@pytest.mark.parametrize("shapes", [((4, 3), (5, 3)), ((4, 3), (4, 2)), ((4,), (4,)), ((0, 3), (0, 3))])
def test_shapes_that_do_not_fit_are_named(shapes):
    with pytest.raises(ValueError, match="one shape"):
        split_loss(np.zeros(shapes[0]), np.zeros(shapes[1]), 1.0, data_mesh())
