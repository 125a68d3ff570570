"""Training with sample state: devices, gradient caching, resuming and gamma's schedule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from infcl_jax import global_contrastive_loss
from infcl_jax.models import CLIPOutput, l2_normalize
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.training import (
    Checkpointer,
    GlobalContrastive,
    GlobalContrastiveConfig,
    GradCacheConfig,
    OptimizerConfig,
    create_state,
    make_train_step,
)

SAMPLES, BATCH = 40, 16


class Data:
    """A data iterator without data."""

    def get_state(self):
        return {"next_batch": 0}

    def set_state(self, state):
        assert state == self.get_state()


def loss(variant="fastclip_v3", devices=1, optimizer=None, **settings):
    config, mesh = GlobalContrastiveConfig(**settings), oracle.mesh_of(devices)
    return GlobalContrastive(name=variant, config=config, steps_per_epoch=2, mesh=mesh, optimizer=optimizer)


@functools.cache
def untrained():
    """State on the host; one model and optimizer, so that steps are compiled once."""
    model = runs.Linear(init_logit_scale=2.7, init_logit_bias=None)
    return jax.device_get(create_state(model, optax.sgd(1e-2), runs.SIDE, runs.CONTEXT, 0, oracle.mesh_of(1)))


def initial(variant, devices=1):
    state = jax.device_put(untrained(), NamedSharding(oracle.mesh_of(devices), PartitionSpec()))
    return state.replace(samples=loss(variant, devices).init_samples(SAMPLES, np.log(1 / 0.07)))


def batch(number):
    index = np.random.default_rng(number).integers(0, SAMPLES, BATCH).astype(np.int32)
    return runs.batch(BATCH, seed=number) | {"index": index}


@functools.cache
def stepper(variant, devices, **cache):
    return make_train_step(loss(variant, devices), 0, GradCacheConfig(**cache), oracle.mesh_of(devices))


def train(variant, state, numbers, devices=1, **cache):
    """The losses of some steps, and the state after them."""
    step, losses = stepper(variant, devices, **cache), []
    for number in numbers:
        rows = batch(number)
        given = rows if cache.get("offload") == "host" else shard_batch(oracle.mesh_of(devices), rows)
        state, metrics = step(state, given)
        losses.append(metrics["loss"])
    return jax.device_get(losses), state


@functools.cache
def reference(variant):
    """Losses and state after two epochs on one device."""
    losses, state = train(variant, initial(variant), range(4))
    return losses, jax.device_get((state.params, state.samples))


@pytest.mark.parametrize(
    ("variant", "devices", "cache"),
    [
        ("fastclip_v3", 4, {}),
        ("fastclip_v2", 2, {"chunk_size": 6, "keep": 1}),
        ("fastclip_v3", 4, {"chunk_size": 8, "offload": "host"}),
    ],
    ids=str,
)
def test_steps_depend_on_neither_devices_nor_caching(variant, devices, cache):
    expected, after = reference(variant)
    losses, state = train(variant, initial(variant, devices), range(4), devices, **cache)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for got, other in zip(jax.tree.leaves((state.params, state.samples)), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(got, other, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(("variant", "devices"), [("fastclip_v2", 4), ("fastclip_v3", 2)])
def test_a_resumed_run_repeats_the_losses(variant, devices, tmp_path):
    """Bit for bit on the same devices, up to rounding on half."""
    with Checkpointer(tmp_path) as checkpoints:
        _, state = train(variant, initial(variant, 4), range(2), 4)
        checkpoints.save(2, state, Data())
        checkpoints.wait()
        expected, after = train(variant, state, range(2, 4), 4)
        restored = checkpoints.restore_latest(initial(variant, devices), Data())
    assert restored.samples.log_u.sharding.num_devices == devices
    losses, state = train(variant, restored, range(2, 4), devices)
    if devices == 4:
        assert runs.equal_bits(losses, expected)
        assert runs.equal_bits(*jax.device_get([state.samples, after.samples]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mode": "published"}, (0.9, 0.999, 1e-8)),
        ({"mode": "reference"}, (0.8, 0.98, 1e-6)),
        (
            {"mode": "published", "temperature_beta1": 0.0, "temperature_beta2": 0.5, "temperature_eps": 1e-3},
            (0.0, 0.5, 1e-3),
        ),
    ],
    ids=str,
)
def test_adam_of_temperatures_is_the_modes_or_as_set(settings, expected):
    rng = np.random.default_rng(0)
    image, text = (l2_normalize(jnp.asarray(rng.normal(size=(BATCH, 8)), jnp.float32), "float32") for _ in range(2))
    output, index = CLIPOutput(image, text, jnp.float32(20.0), None), jnp.arange(BATCH)
    step = loss("isogclr", optimizer=OptimizerConfig(beta1=0.8, beta2=0.98, eps=1e-6), gamma_min=0.5, **settings)
    state = other = step.init_samples(SAMPLES, np.log(1 / 0.07))
    names = ("temperature_beta1", "temperature_beta2", "temperature_eps")
    options = {"rho": 6.5, "temperature_learning_rate": 1e-2, "mode": settings["mode"], "mesh": oracle.mesh_of(1)}
    options |= {"variant": "isogclr"} | dict(zip(names, expected, strict=True))
    explicit = jax.jit(functools.partial(global_contrastive_loss, **options))
    implicit, write = jax.jit(step), jax.jit(step.write)
    for number in range(4):  # two epochs
        rows = implicit(output, index=index, samples=state, step=np.int32(number)).rows
        state = write(state, index, rows)
        _, other = explicit(image, text, index, other, gamma=1.0 if number < 2 else 0.5, epoch=number // 2)
    np.testing.assert_allclose(state.temperature, other.temperature, rtol=1e-6)
    np.testing.assert_allclose(state.second_moment, other.second_moment, rtol=1e-6)


def test_reference_temperatures_need_the_optimizer():
    with pytest.raises(ValueError, match=r"^expected the run's optimizer for isogclr"):
        loss("isogclr", mode="reference")
    loss("fastclip_v3", mode="reference")


@pytest.mark.parametrize(
    ("variant", "schedule", "values"),
    [
        ("fastclip_v3", None, (1.0, 0.6, 0.2, 0.2)),
        ("sogclr", None, (1.0, 0.2, 0.2, 0.2)),
        ("sogclr", "cosine", (1.0, 0.6, 0.2, 0.2)),
    ],
)
def test_gamma_by_epoch(variant, schedule, values):
    schedule = loss(variant, gamma_schedule=schedule, gamma_min=0.2, gamma_epochs=2).gamma
    np.testing.assert_allclose([schedule(np.int32(epoch)) for epoch in range(4)], values, rtol=1e-6)


def test_temperatures_of_samples_start_at_the_models():
    assert loss("fastclip_v3").init_samples(SAMPLES, 2.0).temperature is None
    np.testing.assert_allclose(loss("fastclip_v2").init_samples(SAMPLES, 2.0).temperature, np.exp(-2), rtol=1e-6)


@pytest.mark.parametrize("variant", ["fastclip_v2", "fastclip_v3"])
def test_the_state_knows_who_has_been_seen(variant):
    seen = {sample for number in range(4) for sample in batch(number)["index"]}
    assert 0 < len(seen) < SAMPLES
    assert set(np.flatnonzero(np.isfinite(reference(variant)[1][1].log_u[:, 0]))) == seen


def test_what_does_not_fit_is_an_error_in_one_line():
    step = make_train_step(loss(), 0)
    state = jax.device_put(initial("fastclip_v3"), NamedSharding(oracle.mesh_of(1), PartitionSpec()))
    for given, incomplete in ((runs.batch(BATCH), state), (batch(0), state.replace(samples=None))):
        with pytest.raises(ValueError, match="expected a state with samples and a batch with an index"):
            step(incomplete, given)
    with pytest.raises(ValueError, match="offload 'none' or 'host' with fastclip_v3, got 'replay'"):
        make_train_step(loss(), 0, GradCacheConfig(chunk_size=8, offload="replay"))
    for make in (loss, initial):
        with pytest.raises(ValueError, match="expected loss to be one of"):
            make("fastclip")
    for wrong, message in (
        ({"steps_per_epoch": 0}, "steps_per_epoch >= 1, got 0"),
        ({"implementation": "fast"}, "expected implementation to be one of .*'fast'"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(loss(), **wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "paper"),
        ("gamma_epochs", 0),
        ("temperature_learning_rate", float("nan")),
        ("temperature_beta1", 1.0),
    ],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^expected [^\n]*global_contrastive\.{field}[^\n]*got '?{value}'?$"):
        GlobalContrastiveConfig(**{field: value})
