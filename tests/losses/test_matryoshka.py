"""Losses over prefixes of the features against float64 and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from infcl_jax import clip_loss, matryoshka, retrieval_loss, run, siglip_loss, train
from infcl_jax.losses.matryoshka import prefix
from infcl_jax.models import CLIPOutput
from infcl_jax.settings import check_config

DIMS, WEIGHTS = (3, 6, 12, 24), (1.0, 0.5, 2.0, 1.5)
LOSSES = {
    "clip at scale 100": (clip_loss, (100.0,)),
    "siglip": (siglip_loss, (10.0, -10.0)),
    "retrieval": (retrieval_loss, (14.3,)),
}


def unit(array, dim):
    return array[:, :dim] / np.linalg.norm(array[:, :dim], axis=1, keepdims=True)


@pytest.mark.parametrize(("name", "kind"), [*zip(LOSSES, ("random", "adversarial", "aligned"), strict=True)])
def test_is_the_weighted_sum_over_normalized_prefixes(name, kind):
    loss, scalars = LOSSES[name]
    with jax.enable_x64(True):
        x, y = (np.asarray(a, np.float64) for a in oracle.features(kind, 16, 16, DIMS[-1]))
        pairs = [(jnp.asarray(unit(x, dim)), jnp.asarray(unit(y, dim))) for dim in DIMS]
        losses = jax.jit(lambda pairs: jnp.stack([loss(*pair, *scalars) for pair in pairs]))
        expected = np.dot(WEIGHTS, losses(pairs))
        value_and_grad = jax.jit(jax.value_and_grad(matryoshka(loss, DIMS, WEIGHTS), argnums=(0, 1)))
        value, grads = value_and_grad(x, y, *scalars)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        direction, step = np.random.default_rng(0).standard_normal(x.shape), 1e-6
        ends = [float(value_and_grad(x + t * direction, y - t * direction, *scalars)[0]) for t in (step, -step)]
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(np.sum(direction * (grads[0] - grads[1])), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-19, 1e19, 1e30])
def test_prefixes_of_any_size_are_normalized_with_their_gradients(size):
    rng = np.random.default_rng(0)
    x, cotangent = (rng.standard_normal((4, 6)).astype(np.float32) for _ in range(2))
    x *= size * np.float32([[1], [1], [0], [1]])
    unit_rows, pull = jax.vjp(lambda x: prefix(x, 4), x)
    wide = x[:, :4].astype(np.float64)
    norm = np.linalg.norm(wide, axis=1, keepdims=True) + (wide[:, :1] == 0)  # the row of zeros has no norm
    expected = wide / norm
    np.testing.assert_allclose(unit_rows, expected, rtol=1e-6)
    along = expected * (expected * cotangent[:, :4]).sum(1, keepdims=True)
    np.testing.assert_allclose(pull(cotangent[:, :4])[0][:, :4] * norm, cotangent[:, :4] - along, rtol=1e-5, atol=1e-6)


@functools.cache
def sharded(implementation, devices, dims=DIMS):
    mesh = oracle.mesh_of(devices)
    loss = functools.partial(matryoshka(clip_loss, dims), mesh=mesh, implementation=implementation)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize(("implementation", "devices"), [("ring", 4), ("dense", 1), ("xla", 8)])
def test_same_value_and_gradients_on_any_number_of_devices(implementation, devices):
    """Compares with NumPy, including the gradient of the norm."""
    dims = DIMS[1::2]
    with jax.enable_x64(True):
        x, y = (np.asarray(a, np.float64) for a in oracle.features("random", 16, 16, DIMS[-1]))
        loss, d_x, d_y, d_scale = 0.0, np.zeros_like(x), np.zeros_like(y), 0.0
        for dim in dims:
            value, (d_u, d_v, d_s) = oracle.clip(unit(x, dim), unit(y, dim), 14.3)
            loss, d_scale = loss + value, d_scale + d_s
            for d_features, features, d_unit in ((d_x, x, d_u), (d_y, y, d_v)):
                u, norm = unit(features, dim), np.linalg.norm(features[:, :dim], axis=1, keepdims=True)
                d_features[:, :dim] += (d_unit - u * (u * d_unit).sum(axis=1, keepdims=True)) / norm
        got = sharded(implementation, devices, dims)(x, y, 14.3)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, (loss, (d_x, d_y, d_scale))
        )


def test_masked_rows_do_not_count():
    x, y = map(jnp.asarray, oracle.features("random", 12, 12, DIMS[-1]))
    value_and_grad = jax.jit(jax.value_and_grad(matryoshka(clip_loss, (6, 24)), argnums=(0, 1)))
    mask = jnp.arange(12) < 8
    value, grads = value_and_grad(x.at[8:].set(jnp.nan), y.at[8:].set(jnp.inf), 14.3, mask=mask)
    expected, expected_grads = value_and_grad(x[:8], y[:8], 14.3)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got[:8], want, rtol=1e-4, atol=1e-6)
        assert not got[8:].any()


def test_zero_rows_have_finite_gradients():
    assert not prefix(jnp.zeros((3, 4)), 2).any()
    assert np.isfinite(jax.grad(lambda x: prefix(x, 2).sum())(jnp.zeros((3, 4)))).all()


def test_program_holds_no_pair_matrix():
    b, devices = 8192, 8
    x = jax.ShapeDtypeStruct((b, DIMS[-1]), jnp.float32, sharding=NamedSharding(oracle.mesh_of(devices), P("data")))
    text = sharded("xla", devices, DIMS[1::2]).lower(x, x, jax.ShapeDtypeStruct((), jnp.float32)).as_text()
    shapes = {m for line in text.splitlines() for m in runs_of_shapes(line)}
    assert max(shapes) >= b * DIMS[-1] // devices  # the features themselves are found
    assert max(shapes) < b * b // devices


def runs_of_shapes(line):
    for shape in line.split("tensor<")[1:]:
        yield int(np.prod([int(n) for n in shape.split(">")[0].split("x")[:-1]] or [1], dtype=np.int64))


@pytest.mark.parametrize("dims", [(), (4, 4), (8, 4), (0, 4), (4.0,), (True,)])
def test_wrong_dims(dims):
    with pytest.raises(ValueError, match=r"^expected dims"):
        matryoshka(clip_loss, dims)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, float("nan"))])
def test_wrong_weights(weights):
    with pytest.raises(ValueError, match=r"^expected one positive weight"):
        matryoshka(clip_loss, (2, 4), weights)


def test_features_too_small():
    x, y = oracle.features("random", 4, 4, 8)
    with pytest.raises(ValueError, match=r"^expected features .* D >= 9"):
        matryoshka(clip_loss, (4, 9))(x, y, 1.0)
    with pytest.raises(ValueError, match=r"^expected a loss that returns a scalar"):
        matryoshka(lambda x, y: x, (4,))(x, y)


@pytest.mark.parametrize("positives", ["pair", "caption"])
def test_the_training_loss_is_the_function(positives):
    image, text = oracle.features("random", 8, 8, 16)
    ids = np.random.default_rng(0).integers(0, 5, (8, 2)).astype(np.int32)
    loss = run.loss(runs.config(matryoshka=(4, 16), positives=positives, label_smoothing=0.1), None)
    inputs = {"ids": ids} if positives == "caption" else {}
    output = loss(CLIPOutput(image, text, jnp.float32(10.0), None), **inputs)
    options = {"image_ids": ids, "text_ids": ids} if inputs else {}
    expected = matryoshka(clip_loss, (4, 16))(image, text, 10.0, label_smoothing=0.1, **options)
    np.testing.assert_allclose(output.value, expected, rtol=1e-6)
    assert loss.batch_inputs == tuple(inputs) and (output.extra_positives is None) == (not inputs)


@pytest.mark.slow
def test_a_run_trains_and_evaluates_every_prefix(tmp_path):
    config = runs.config(matryoshka=(4, 8, 16), **{"eval_every": 6, "checkpoint_every": 6, "grad_cache.chunk_size": 16})
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        results = train(config, tmp_path)
    trained, _ = runs.history(tmp_path)
    assert trained[0]["loss"] > 2 * np.log(32)  # of three prefixes
    assert {f"{task}@{dim}/{metric}" for task, metric in TASKS for dim in (4, 8)} <= set(results)
    assert not any("@16" in name for name in results)


TASKS = (("zero_shot", "top1"), ("retrieval", "mean_r1"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matryoshka": (8, 4)}, "^expected matryoshka to be increasing"),
        ({"matryoshka": (8, 16), "loss": "fastclip_v3"}, "^expected loss clip or siglip"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(runs.config(**changes))


def test_a_prefix_larger_than_the_features_of_the_model():
    with pytest.raises(ValueError, match=r"^expected matryoshka with sizes of at most 16"):
        run.loss(runs.config(matryoshka=(8, 32)), None)
