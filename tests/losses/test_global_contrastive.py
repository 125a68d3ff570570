"""Every variant against the published formulas in fp64, against CLIP, and its state."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_global
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from infcl_jax import create_samples, global_contrastive_loss
from infcl_jax.losses.samples import LENGTH_MULTIPLE, SampleState, read_samples, write_samples
from infcl_jax.losses.variants import VARIANTS
from infcl_jax.ops.pairwise.lse import available_implementations

OBJECTIVES = ("sogclr", "fastclip_v0", "fastclip_v2", "fastclip_v3")
SAMPLES, BATCH, STEPS, EPOCHS = 40, 8, 4, 4
RATE = 2e-2
ADAM = (0.9, 0.98, 1e-6)  # of the temperatures, as the authors train ViTs
RHO = {"isogclr": 1.0, "fastclip_v2": 1.0, "fastclip_v3": 6.5}


def own_temperatures(variant):
    return oracle_global.LOSSES[variant][0] == "samples"


def settings(variant, epoch, scale, rate=RATE, rho=None):
    own = {"epoch": epoch, "temperature_learning_rate": rate} if own_temperatures(variant) else {"logit_scale": scale}
    return own | ({"rho": RHO[variant] if rho is None else rho} if variant in RHO else {})


@functools.cache
def stepper(variant, devices, mode="published", implementation=None, rate=RATE, rho=None, adam=None):
    """`(image, text, scale, index, state, gamma, epoch) -> ((loss, state), gradients)`."""
    names = ("temperature_beta1", "temperature_beta2", "temperature_eps")
    fixed = {} if adam is None else dict(zip(names, adam, strict=True))

    def loss(image, text, scale, index, state, gamma, epoch):
        options = {"variant": variant, "mode": mode, "implementation": implementation, "mesh": oracle.mesh_of(devices)}
        changing = settings(variant, epoch, scale, rate, rho) | fixed
        return global_contrastive_loss(image, text, index, state, gamma=gamma, **options, **changing)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def fresh(variant, devices=1, temperature=0.07):
    return create_samples(
        SAMPLES, temperature=temperature if own_temperatures(variant) else None, mesh=oracle.mesh_of(devices)
    )


def batches():
    """Sixteen batches over four epochs; each epoch leaves out other samples."""
    rng = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        order = rng.permutation(SAMPLES)
        for step in range(STEPS):
            number = epoch * STEPS + step
            features = oracle.features("random", BATCH, BATCH, 33, seed=number)
            scale = np.float32(1 / 0.07 * (0.07 / 0.01) ** (number / (EPOCHS * STEPS - 1)))  # tau from 0.07 to 0.01
            gamma = np.float32((1.0, 0.8, 0.5, 0.2)[epoch])
            yield epoch, gamma, scale, order[step * BATCH : (step + 1) * BATCH], features


@pytest.mark.parametrize(
    ("variant", "mode", "devices", "adam"),
    [
        *((variant, "published", devices, None) for variant, devices in zip(OBJECTIVES, itertools.cycle((1, 4)))),
        *(
            pytest.param(variant, "reference", 4, None, marks=pytest.mark.slow)
            for variant in OBJECTIVES
            if variant != "fastclip_v2"
        ),
        ("fastclip_v2", "reference", 4, ADAM),
    ],
)
def test_sixteen_steps_are_those_of_the_formulas(variant, mode, devices, adam):
    step, state = stepper(variant, devices, mode, adam=adam), fresh(variant, devices, temperature=0.03)
    memory = oracle_global.Memory.of(SAMPLES, 0.03)
    for epoch, gamma, scale, index, (image, text) in batches():
        (loss, state), gradients = step(image, text, scale, index, state, gamma, epoch)
        constants = {"variant": variant, "mode": mode, "rho": RHO.get(variant), "rate": RATE}
        constants |= {} if adam is None else {"adam": adam}
        expected, expected_gradients = oracle_global.step(
            memory, image, text, index, gamma=gamma, epoch=epoch, scale=scale, **constants
        )
        assert loss == pytest.approx(expected, rel=1e-5)
        for got, reference in zip(gradients, expected_gradients, strict=True):
            assert oracle.relative_error(got, reference) <= 1e-5 or not (np.any(got) or np.any(reference))
    seen = memory.u[:, 0] > 0
    assert 0 < seen.sum() <= SAMPLES
    log_u = np.asarray(state.log_u[:SAMPLES], np.float64)
    assert np.array_equal(np.isfinite(log_u[:, 0]), seen)
    assert np.sqrt(np.square(log_u[seen] - np.log(memory.u[seen])).mean()) <= 1e-5  # the relative error of u
    if own_temperatures(variant):
        assert memory.tau.min() == 0.01
        for got, reference in zip(state[1:], (memory.tau, memory.first, memory.second), strict=True):
            assert oracle.relative_error(got[:SAMPLES], reference) <= 1e-5


@pytest.mark.parametrize(("variant", "other"), [("fastclip_v1", "sogclr"), ("fastclip_v2", "isogclr")])
def test_variants_differ_in_the_schedule_of_gamma_alone(variant, other):
    assert dataclasses.replace(VARIANTS[variant], gamma_schedule="constant") == VARIANTS[other]


def test_temperatures_are_those_of_the_authors_code():
    """Twelve steps over four epochs, see golden/make_fastclip.py."""
    with np.load(Path(__file__).parents[1] / "golden" / "fastclip.npz") as file:
        golden = dict(file)
    samples = golden["temperature"].shape[1]
    step = stepper("fastclip_v2", 1, "reference", rate=5e-3, rho=5.0, adam=ADAM)
    state = create_samples(samples, temperature=0.07)
    for number, batch in enumerate(zip(golden["image"], golden["text"], golden["index"], strict=True)):
        epoch = number // 3
        gamma = np.float32(0.2 + 0.8 * (1 + np.cos(np.pi * min(epoch, 3) / 3)) / 2)
        image, text, index = batch
        (_, state), _ = step(image, text, None, index, state, gamma, epoch)
        np.testing.assert_allclose(state.temperature[:samples], golden["temperature"][number], rtol=1e-5)
        np.testing.assert_allclose(state.log_u[:samples], golden["log_u"][number], atol=1e-4)


def test_adam_of_temperatures_without_momentum():
    image, text = oracle.features("random", 8, 8, 33)
    adam, index = (0.0, 0.5, 1e-3), np.arange(8)
    step, state = stepper("fastclip_v2", 1, adam=adam), fresh("fastclip_v2")
    memory = oracle_global.Memory.of(SAMPLES, 0.07)
    for epoch, gamma in ((0, 1.0), (1, 0.5)):
        (_, state), _ = step(image, text, None, index, state, np.float32(gamma), epoch)
        options = {"variant": "fastclip_v2", "mode": "published", "rho": 1.0, "rate": RATE, "adam": adam}
        oracle_global.step(memory, image, text, index, gamma=gamma, epoch=epoch, **options)
    np.testing.assert_allclose(state.temperature[:8], memory.tau[:8], rtol=1e-5)


@pytest.mark.parametrize(("devices", "kind"), [(1, "random"), (8, "aligned"), (8, "adversarial")])
def test_without_memory_it_is_the_loss_of_clip(devices, kind):
    b, scale, mesh = 16, jnp.float32(100.0), oracle.mesh_of(devices)
    image, text = oracle.features(kind, b, b, 33)
    changes = {"variant": "fastclip_v0", "gamma": 1.0, "eps": 1 / (b - 1), "mesh": mesh}

    def loss(image, text, scale):
        state = fresh("fastclip_v0", devices)
        return global_contrastive_loss(image, text, np.arange(b), state, logit_scale=scale, **changes)[0] / 2

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(image, text, scale)
    expected, expected_gradients = oracle.clip(image, text, scale)
    assert value == pytest.approx(expected - np.log(b - 1), rel=1e-5, abs=1e-5)
    for got, reference in zip(gradients, expected_gradients, strict=True):
        slack = 1e-6 * 100 if kind == "aligned" else 0.0  # there the true gradient all but cancels
        assert oracle.absolute_error(got, reference) <= 1e-5 * np.linalg.norm(reference) + slack


@pytest.mark.parametrize(
    ("implementation", "variant"),
    [*((name, "fastclip_v2") for name in available_implementations()), ("ring", "fastclip_v3")],
)
def test_every_implementation_gives_the_same(implementation, variant):
    image, text = oracle.features("random", 16, 16, 33, jnp.bfloat16 if implementation == "triton" else np.float32)
    arguments = (image, text, np.float32(30), np.arange(16), fresh(variant, 4), np.float32(0.5), 1)
    (loss, state), gradients = stepper(variant, 4, implementation=implementation)(*arguments)
    (expected, expected_state), expected_gradients = stepper(variant, 4, implementation="dense")(*arguments)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(state.log_u, expected_state.log_u, atol=1e-5)
    for got, reference in zip(gradients, expected_gradients, strict=True):
        assert oracle.absolute_error(got, reference) <= 1e-5 * np.linalg.norm(np.asarray(reference, np.float64))


@pytest.mark.usefixtures("compiled_afresh")
def test_two_runs_are_bitwise_equal():
    image, text = oracle.features("random", 16, 16, 33)
    arguments = (image, text, np.float32(30), np.arange(16) % 9, fresh("fastclip_v2", 8), np.float32(0.5), 1)
    results = [stepper("fastclip_v2", 8)(*arguments) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("variant", ["fastclip_v2", "fastclip_v3"])
def test_mask_equals_leaving_out(variant):
    image, text = oracle.features("random", 16, 16, 33)
    keep = np.random.default_rng(1).random(16) < 0.6
    index = np.where(keep, np.arange(16) + 5, -1)

    def loss(image, text, index, mask):
        options = settings(variant, 1, np.float32(20.0)) | {"variant": variant, "gamma": 0.7, "mask": mask}
        return global_contrastive_loss(image, text, index, fresh(variant), **options)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, state), gradients = step(image, text, index, keep)
    (expected, expected_state), expected_gradients = step(image[keep], text[keep], index[keep], None)
    assert value == pytest.approx(float(expected), rel=1e-6)
    for got, reference in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got[keep], reference, rtol=1e-4, atol=1e-6)
        assert not np.any(np.asarray(got)[~keep])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), state, expected_state)


@pytest.mark.parametrize("checked", [True, False])
def test_inside_shard_map(checked):
    image, text = oracle.features("random", 16, 16, 33)
    index, scale, state = np.arange(16), jnp.float32(20.0), fresh("fastclip_v3", 4)

    def inside(image, text, index, state, scale):
        options = settings("fastclip_v3", 0, scale) | {"gamma": 0.5, "axis_name": "data"}
        return global_contrastive_loss(image, text, index, state, variant="fastclip_v3", **options)

    specs, results = (*(P("data"),) * 4, P()), (P(), P("data"))
    mapped = jax.shard_map(inside, mesh=oracle.mesh_of(4), in_specs=specs, out_specs=results, check_vma=checked)
    step = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1, 4), has_aux=True))
    (loss, after), gradients = step(image, text, index, state, scale)
    expected = stepper("fastclip_v3", 4)(image, text, scale, index, state, np.float32(0.5), 0)
    assert loss == pytest.approx(float(expected[0][0]), rel=1e-6)
    np.testing.assert_array_equal(after.log_u, expected[0][1].log_u)
    for got, reference in zip(gradients, expected[1], strict=True):
        assert oracle.relative_error(got, reference) <= 1e-6


def test_a_mesh_with_two_axes():
    image, text = oracle.features("random", 16, 16, 33)
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    expected = stepper("fastclip_v1", 1)(image, text, 20.0, np.arange(16), fresh("fastclip_v1"), np.float32(0.5), 0)
    for axes, shards in (("data", 4), (("replica", "data"), 8)):
        state = create_samples(SAMPLES, mesh=mesh, axis_name=axes)
        assert len({shard.index for shard in state.log_u.addressable_shards}) == shards

        def loss(image, text, state, axes=axes):
            options = settings("fastclip_v1", 0, 20.0) | {"mesh": mesh, "axis_name": axes}
            return global_contrastive_loss(
                image, text, np.arange(16), state, variant="fastclip_v1", gamma=0.5, **options
            )

        value, after = jax.jit(loss)(image, text, state)
        assert value == pytest.approx(float(expected[0][0]), rel=1e-6)
        np.testing.assert_allclose(after.log_u, expected[0][1].log_u, rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 4])
def test_of_several_rows_for_one_sample_the_last_counts(devices):
    index = np.random.default_rng(0).integers(-2, 30, 64).astype(np.int32)
    rows = SampleState(np.arange(128, dtype=np.float32).reshape(64, 2))
    written = write_samples(fresh("sogclr", devices), jnp.asarray(index), rows, mesh=oracle.mesh_of(devices)).log_u
    expected = np.full((SAMPLES, 2), -np.inf, np.float32)
    for sample, row in zip(index, rows.log_u, strict=True):
        if sample >= 0:
            expected[sample] = row
    np.testing.assert_array_equal(written[:SAMPLES], expected)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_sample_that_is_not_there_is_nan_and_never_written(devices):
    state, mesh = fresh("isogclr", devices), oracle.mesh_of(devices)
    there, missing = [0, 1, SAMPLES - 1], [-1, SAMPLES, LENGTH_MULTIPLE - 1, LENGTH_MULTIPLE, 2**31 - 1]
    index = jnp.asarray([*there, *missing], jnp.int32)
    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
    read = jax.shard_map(lambda state, index: read_samples(state, index, "data"), mesh=mesh, **specs)
    for array, fill in zip(jax.jit(read)(state, index), (-np.inf, 0.07, 0, 0), strict=True):
        np.testing.assert_allclose(array, [[fill] * 2] * len(there) + [[np.nan] * 2] * len(missing), rtol=1e-6)
    image, text = oracle.features("random", 8, 8, 33)
    (loss, after), _ = stepper("isogclr", devices)(image, text, None, index, state, np.float32(0.5), 1)
    assert np.isnan(loss)
    rows = jax.tree.map(lambda a: jnp.full_like(a[:8], 0.5), state)
    written = jax.jit(functools.partial(write_samples, mesh=mesh))(state, index, rows)
    for changed in (after, written):
        for new, old in zip(changed, state, strict=True):
            np.testing.assert_array_equal(new[SAMPLES:], old[SAMPLES:])
            assert (np.asarray(new)[there] != np.asarray(old)[there]).all()


def test_a_known_index_is_checked_where_the_state_is_traced():
    features, options = np.ones((4, 3), np.float32), {"variant": "sogclr", "gamma": 1.0, "logit_scale": 1.0}

    def loss(state, index, mask=None):
        return global_contrastive_loss(features, features, index, state, mask=mask, **options)[0]

    index = np.arange(4) + LENGTH_MULTIPLE - 3
    with pytest.raises(ValueError, match=rf"index in \[0, {LENGTH_MULTIPLE}\), .* to {LENGTH_MULTIPLE}"):
        jax.eval_shape(lambda state: loss(state, index), fresh("sogclr"))
    assert jax.eval_shape(lambda state: loss(state, index, np.arange(4) < 3), fresh("sogclr")).shape == ()


@pytest.mark.parametrize("variant", ["isogclr", "fastclip_v3"])
def test_gamma_of_zero_keeps_u_of_seen_samples_only(variant):
    step, (image, text) = stepper(variant, 1), oracle.features("random", 8, 8, 33)
    scale, index, one, zero = np.float32(20.0), np.arange(8), np.float32(1.0), np.float32(0.0)
    (_, seen), _ = step(image, text, scale, np.where(index < 6, index, index + 8), fresh(variant), one, 0)
    (loss, after), gradients = step(image, text, scale, index, seen, zero, 1)
    np.testing.assert_array_equal(after.log_u[:6], seen.log_u[:6])
    (_, alone), _ = step(image, text, scale, index, fresh(variant), one, 0)
    np.testing.assert_allclose(after.log_u[6:8], alone.log_u[6:8], rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, gradients, after.log_u[:8])))
    options = settings(variant, 1, scale) | {"variant": variant, "gamma": 0.0}  # not traced
    assert jax.eval_shape(lambda: global_contrastive_loss(image, text, index, seen, **options))[0].shape == ()


@pytest.mark.parametrize("kind", ["aligned", "adversarial"])
def test_gamma_of_zero_is_finite_at_the_highest_scale(kind):
    step, (image, text) = stepper("fastclip_v3", 1), oracle.features(kind, 16, 16, 33)
    state = fresh("fastclip_v3")
    for epoch in range(2):
        (loss, state), gradients = step(image, text, np.float32(100), np.arange(16), state, np.float32(0.0), epoch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, gradients, state.log_u[:16])))


def lowered(variant, samples, devices=8):
    """Compiled loss and gradients with donated state, and the state's shapes."""
    mesh = oracle.mesh_of(devices)
    state = jax.eval_shape(lambda: create_samples(samples, temperature=0.07 if own_temperatures(variant) else None))
    rows = jax.NamedSharding(mesh, P("data"))
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), state)
    features = jax.ShapeDtypeStruct((64, 16), np.float32, sharding=rows)
    index = jax.ShapeDtypeStruct((64,), np.int32, sharding=rows)
    scalar = jax.ShapeDtypeStruct((), np.float32)
    step = jax.jit(stepper(variant, devices).__wrapped__, donate_argnums=4)
    compiled = step.lower(features, features, scalar, index, placed, scalar, jax.ShapeDtypeStruct((), np.int32))
    return compiled.compile(), sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("variant", "per_sample"), [pytest.param("fastclip_v3", 8, marks=pytest.mark.full), ("fastclip_v2", 32)]
)
def test_a_hundred_million_samples_are_sharded_and_never_moved(variant, per_sample):
    samples = 100_000_000
    compiled, size = lowered(variant, samples)
    assert size == pytest.approx(per_sample * samples, rel=2e-3)
    small = lowered(variant, 1)[0]
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(size / 8, rel=1e-3)
    assert memory.alias_size_in_bytes >= size / 8  # overwritten in place
    assert memory.temp_size_in_bytes <= small.memory_analysis().temp_size_in_bytes + 4096
    moved = r"= (\S+) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    collectives = [sorted(re.findall(moved, program.as_text())) for program in (compiled, small)]
    assert collectives[0] == collectives[1] != []


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("fastclip_v4", {}, "variant"),
        ("fastclip_v3", {"mode": "paper"}, "mode"),
        ("fastclip_v3", {"gamma": -0.1}, "0 <= gamma <= 1, got -0.1"),
        ("fastclip_v3", {"gamma": float("nan")}, "0 <= gamma <= 1"),
        ("fastclip_v2", {"temperature_beta1": 1.0}, "0 <= temperature_beta1 < 1, got 1.0"),
        ("fastclip_v2", {"temperature_beta2": -0.1}, "0 <= temperature_beta2 < 1, got -0.1"),
        ("fastclip_v3", {"temperature_beta2": 0.98}, "expected no temperature_beta1"),
        ("fastclip_v2", {"temperature_eps": 0.0}, "temperature_eps > 0, got 0.0"),
        ("fastclip_v3", {"eps": 0.0}, "eps > 0"),
        ("fastclip_v3", {"logit_scale": None}, "expected logit_scale"),
        ("fastclip_v3", {"epoch": 1}, "expected no epoch"),
        ("fastclip_v1", {"rho": 6.5}, "expected no rho"),
        ("fastclip_v2", {"logit_scale": 1.0}, "expected no logit_scale"),
        ("fastclip_v2", {"temperature_learning_rate": None}, "expected temperature_learning_rate"),
        ("fastclip_v2", {"state": create_samples(8)}, "temperatures in the state"),
        ("fastclip_v3", {"index": np.zeros(7, np.int32)}, "expected index"),
        ("fastclip_v3", {"index": np.zeros(8, np.float32)}, "expected index"),
        ("fastclip_v3", {"index": np.arange(8) - 1}, r"index in \[0, .* got values -1 to 6"),
        ("fastclip_v3", {"index": np.arange(8) + LENGTH_MULTIPLE - 7}, rf"index in \[0, {SAMPLES}\)"),
        ("fastclip_v3", {"index": np.arange(8) + SAMPLES - 7}, rf"index in \[0, {SAMPLES}\).* to {SAMPLES}"),
    ],
)
def test_bad_input_is_a_one_line_error(variant, change, message):
    known = variant if variant in VARIANTS else "fastclip_v3"
    features = np.ones((8, 3), np.float32)
    arguments = {"image": features, "text": features, "index": np.arange(8), "state": fresh(known), "gamma": 1.0}
    with pytest.raises(ValueError, match=message) as error:
        global_contrastive_loss(**(arguments | {"variant": variant} | settings(known, 0, 1.0) | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": 2**31}, "samples"),
        ({"samples": 8, "temperature": 0.0}, "temperature"),
        ({"samples": 8, "mesh": oracle.mesh_of(2), "axis_name": "rows"}, "mesh's axes"),
    ],
)
def test_a_state_that_cannot_be_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        create_samples(**arguments)
