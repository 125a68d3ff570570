"""The training step: equal for any devices and implementation, deterministic, refuses NaN."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from infcl_jax.data import Augmentation
from infcl_jax.data.packing import Packing
from infcl_jax.grad_cache import Replay
from infcl_jax.losses import Loss, LossOutput
from infcl_jax.models import TOWERS
from infcl_jax.ops.color import ColorBatch, adjust_colors
from infcl_jax.ops.pairwise.lse import IMPLEMENTATIONS, available_implementations
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.training import LOSSES, GradCacheConfig, check_finite, create_state, make_loss, make_train_step

BATCH = 32
RATE = 1e-2
DROPOUT = {"vision.dropout": 0.1, "vision.patch_dropout": 0.25, "text.dropout": 0.1}
OTHERS = [name for name in available_implementations() if name != "xla"]


def fresh(model):
    """State on the host with plain gradient descent: equal updates mean equal gradients."""
    return jax.device_get(create_state(model, optax.sgd(RATE), runs.SIDE, runs.CONTEXT, 0, oracle.mesh_of(1)))


def stepper(devices, loss="clip", implementation=None, batch=None, **cache):
    """`state on the host -> (state, metrics) after a step, on the host`."""
    batch = runs.batch(BATCH) if batch is None else batch
    mesh = oracle.mesh_of(devices)
    step = make_train_step(make_loss(loss, mesh, implementation), 0, GradCacheConfig(**cache), mesh)

    def take(state):
        placed = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        return jax.device_get(step(placed, batch if cache.get("offload") == "host" else shard_batch(mesh, batch)))

    return take


def update(after, before):
    pairs = zip(jax.tree.leaves(after.params), jax.tree.leaves(before.params), strict=True)
    return np.concatenate([np.ravel(a - b) for a, b in pairs])


def assert_same_step(got, expected, before):
    (got_after, got_metrics), (after, metrics) = got, expected
    np.testing.assert_allclose(got_metrics["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(got_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-5)
    assert oracle.relative_error(update(got_after, before), update(after, before)) < 1e-5


@pytest.fixture(scope="module")
def linear():
    return fresh(runs.Linear())


@pytest.fixture(scope="module")
def linear_steps(linear):
    """A step on one device with every pair in one matrix, by loss."""
    return {"clip": stepper(1, "clip", "dense")(linear), "siglip": stepper(1, "siglip", "xla")(linear)}


@pytest.fixture(scope="module")
def clip():
    return fresh(runs.model())


@pytest.fixture(scope="module")
def clip_step():
    return stepper(1)


def siglip_reference(image, text, scale, bias):
    logits = scale * image.astype(np.float64) @ text.astype(np.float64).T + bias
    signs = 2 * np.eye(len(image)) - 1
    return np.logaddexp(0, -signs * logits).sum() / len(image)


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_the_metrics_are_those_of_the_batch_in_fp64(linear, linear_steps, loss):
    after, metrics = linear_steps[loss]
    batch = runs.batch(BATCH)
    image, text, scale, bias = jax.device_get(linear.apply_fn({"params": linear.params}, batch["image"], batch["text"]))
    expected = siglip_reference(image, text, scale, bias) if loss == "siglip" else oracle.clip(image, text, scale)[0]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["logit_scale"], scale, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(update(after, linear)), RATE * metrics["grad_norm"], rtol=1e-4)
    for tower, module in TOWERS.items():
        moved = jax.tree.map(lambda a, b: a - b, after.params[module], linear.params[module])
        np.testing.assert_allclose(optax.tree.norm(moved), RATE * metrics[f"grad_norm/{tower}"], rtol=1e-4)
    assert int(after.step) == 1


@pytest.mark.parametrize(
    ("loss", "implementation", "devices"),
    [
        *(("clip", "xla", devices) for devices in (1, 8)),
        *(("clip", name, devices) for name, devices in zip(OTHERS, itertools.cycle((8, 4, 2)), strict=False)),
        ("siglip", "xla", 8),
        ("siglip", "ring", 4),
    ],
)
def test_a_step_depends_on_neither_devices_nor_implementation(linear, linear_steps, loss, implementation, devices):
    assert_same_step(stepper(devices, loss, implementation)(linear), linear_steps[loss], linear)


@pytest.mark.parametrize(
    ("model", "devices", "cache"),
    [
        ("clip", 1, {"chunk_size": 16, "keep_residual": True, "offload": "host"}),
        ("linear", 1, {"chunk_size": 12, "offload": "host"}),
        ("linear", 8, {"chunk_size": 24, "keep": 1, "keep_residual": True}),
    ],
    ids=str,
)
def test_gradient_caching_makes_the_same_step(request, clip_step, model, devices, cache):
    state = request.getfixturevalue(model)
    assert_same_step(stepper(devices, **cache)(state), clip_step(state), state)


@pytest.fixture(scope="module")
def ragged():
    """Batch of texts of different lengths."""
    batch, step = runs.batch(BATCH), np.arange(runs.CONTEXT)
    lengths = np.random.default_rng(0).integers(2, runs.CONTEXT, (BATCH, 1))
    text = np.where(step == lengths - 1, 258, np.where(step < lengths, batch["text"], 0)).astype(np.int32)
    return batch | {"text": text}


@pytest.fixture(scope="module")
def ragged_step(clip, ragged):
    return stepper(1, batch=ragged)(clip)


@pytest.mark.parametrize(
    ("devices", "cache"),
    [
        (4, {}),
        (1, {"chunk_size": 12, "keep": 1}),
        pytest.param(4, {"chunk_size": 16}, marks=pytest.mark.full),
        (8, {"chunk_size": 16, "offload": "host", "keep_residual": True}),
    ],
    ids=str,
)
def test_packed_texts_make_the_same_step(clip, ragged, ragged_step, devices, cache):
    block = BATCH // devices
    packing = Packing(row_length=64, rows=block, shard=cache.get("chunk_size", BATCH) // devices)
    packed = packing.pack(ragged["text"], clip.apply_fn.__self__.text.lengths(ragged["text"]), block)
    assert_same_step(stepper(devices, batch=ragged | {"text": packed}, **cache)(clip), ragged_step, clip)


@pytest.fixture(scope="module")
def colored(linear):
    """Images that the step adjusts, and a step on the adjusted images."""
    augmentation = Augmentation(color_jitter=(0.4, 0.4, 0.4, 0.1), color_jitter_prob=0.8, gray_scale_prob=0.2)
    color = np.stack([augmentation.draw_color(np.random.default_rng(row)) for row in range(BATCH)])
    unadjusted = ColorBatch(runs.batch(BATCH)["image"], color)
    adjusted = np.asarray(jax.jit(adjust_colors)(unadjusted))
    return unadjusted, stepper(1, batch=runs.batch(BATCH) | {"image": adjusted})(linear)


@pytest.mark.parametrize(
    ("devices", "cache"),
    [
        (4, {}),
        (4, {"chunk_size": 12, "keep": 1}),
        (4, {"chunk_size": 12, "offload": "host"}),
        (1, {"chunk_size": 16, "offload": "replay"}),
    ],
    ids=str,
)
def test_colors_are_those_of_the_row(linear, linear_steps, colored, devices, cache):
    unadjusted, expected = colored
    batch = runs.batch(BATCH) | {"image": unadjusted}
    if cache.get("offload") == "replay":
        size = cache["chunk_size"]

        def load(name):
            return lambda n: jax.tree.map(lambda a: a[n * size : (n + 1) * size], batch[name])

        step = make_train_step(make_loss("clip", None, None), 0, GradCacheConfig(**cache))
        result = jax.device_get(step(jax.device_put(linear), {name: Replay(BATCH, load(name)) for name in batch}))
    else:
        result = stepper(devices, batch=batch, **cache)(linear)
    assert_same_step(result, expected, linear)
    assert oracle.relative_error(update(linear_steps["clip"][0], linear), update(expected[0], linear)) > 1e-3


def test_driven_from_the_host_features_go_before_activations_come(linear):
    """While chunks are encoded again, of all features only their gradients are there."""
    mesh, batch, alive = oracle.mesh_of(1), runs.batch(40), []

    def load(number):
        alive.append(sum(array.shape == (40, 8) for array in jax.live_arrays()))
        return batch["text"][8 * number : 8 * (number + 1)]

    step = make_train_step(make_loss("clip", mesh), 0, GradCacheConfig(chunk_size=8, offload="host"), mesh)
    jax.block_until_ready(step(jax.device_put(linear), batch | {"text": Replay(40, load)}))
    assert alive == 5 * [1] + 5 * [2]  # in the first pass those of the images


@pytest.fixture(scope="module")
def dropout():
    return fresh(runs.model(**DROPOUT))


@pytest.fixture(scope="module")
def dropout_step(dropout):
    """`step number -> (state, metrics)` of a model with all dropout, on eight devices."""
    take = stepper(8)
    return lambda number: take(dropout.replace(step=np.asarray(number, dropout.step.dtype)))


def test_a_step_repeats_bit_for_bit(dropout_step):
    assert runs.equal_bits(dropout_step(3), dropout_step(3))


def test_every_step_drops_something_else(dropout_step, clip, clip_step):
    losses = [float(dropout_step(number)[1]["loss"]) for number in range(3)]
    assert len({*losses, float(clip_step(clip)[1]["loss"])}) == 4


def test_dropout_does_not_depend_on_the_devices(dropout, dropout_step, clip_step):
    assert_same_step(clip_step(dropout), dropout_step(0), dropout)


def poisoned(state, name):
    """The state with NaN in the first parameter under `name`."""
    leaves, structure = jax.tree.flatten(state.params[name])
    bad = structure.unflatten([leaves[0] * np.float32("nan"), *leaves[1:]])
    return state.replace(params={**state.params, name: bad})


@pytest.mark.parametrize(
    ("parameter", "stage"), [("visual", "image features"), ("text", "text features"), ("logit_scale", "the loss")]
)
def test_the_first_stage_that_is_not_finite_is_named(clip, clip_step, parameter, stage):
    _, metrics = clip_step(poisoned(clip, parameter))
    with pytest.raises(FloatingPointError, match=rf"^step 7: {stage} became NaN[^\n]*lower learning rate[^\n]*$"):
        check_finite(7, metrics)


def test_a_gradient_that_is_not_finite_is_named_with_its_part(linear):
    class SquareRoot(Loss):
        """A finite value whose gradient is not."""

        def __call__(self, output, **inputs):
            return LossOutput(jnp.sqrt(jnp.square(output.text).sum() * jnp.float32(0.0)))

    loss = SquareRoot(name="square root")
    _, metrics = jax.device_get(make_train_step(loss, seed=0)(jax.device_put(linear), runs.batch(BATCH)))
    assert np.isfinite(metrics["loss"])
    with pytest.raises(FloatingPointError, match="the gradient of text became NaN"):
        check_finite(1, metrics)


def test_finite_metrics_pass(linear_steps):
    metrics = linear_steps["clip"][1]
    check_finite(1, metrics)
    stages = list(metrics["finite"])
    assert stages[:3] == ["image features", "text features", "the loss"]
    assert {f"the gradient of {name}" for name in ("visual", "text", "logit_scale")} <= set(stages[3:])


@pytest.mark.parametrize(
    ("name", "implementation", "message"),
    [
        ("contrastive", None, f"expected loss to be one of {tuple(LOSSES)}, got 'contrastive'"),
        ("clip", "fast", f"expected implementation to be one of {tuple(IMPLEMENTATIONS)} or None, got 'fast'"),
    ],
)
def test_unknown_names_are_refused_at_once(name, implementation, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_loss(name, oracle.mesh_of(1), implementation)


def test_siglip_needs_a_bias():
    with pytest.raises(ValueError, match="for the siglip loss, got none; set model_overrides init_logit_bias"):
        stepper(1, "siglip")(fresh(runs.Linear(init_logit_bias=None)))
