"""Gradient caching against the direct gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from towers import (
    RNG,
    SEPARATE,
    TOWERS,
    assert_equal,
    batch_sharding,
    cached,
    contrastive,
    direct,
    image_tower,
    mlp_batch,
    mlp_params,
    place,
    text_tower,
)

from infcl_jax import Replay, chunk_rows, clip_loss
from infcl_jax.models import create_model

SMALL_CLIP = {
    "vision.image_size": 16,
    "vision.width": 32,
    "vision.layers": 1,
    "vision.dropout": 0.2,
    "vision.patch_dropout": 0.5,
    "text.width": 32,
    "text.layers": 1,
    "text.context_length": 8,
    "text.dropout": 0.2,
}


@functools.cache
def mlp_direct(towers, rows, chunk_size, devices):
    return direct(TOWERS[towers], contrastive, chunk_size, devices)(mlp_params(), mlp_batch(rows), RNG)


# Every pair of values, and every combination with the mark full.
PAIRS = [("none", 1, "tied", 32), ("none", 4, "separate", 44), ("host", 1, "separate", 44), ("host", 4, "tied", 32)]
REST = [("none", 1, "separate", 44), ("none", 4, "tied", 32), ("host", 1, "tied", 32), ("host", 4, "separate", 44)]


@pytest.mark.parametrize(
    ("offload", "devices", "towers", "rows"), [*PAIRS, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_equals_the_direct_gradient(offload, devices, towers, rows):
    sharding = batch_sharding(devices)
    loss = functools.partial(contrastive, mesh=None if sharding is None else sharding.mesh)
    f = cached(TOWERS[towers], loss, offload, chunk_size=16, sharding=sharding)
    got = f(*place(mlp_params(), mlp_batch(rows), offload, sharding), RNG)
    assert_equal(got, mlp_direct(towers, rows, 16, devices))


@functools.cache
def clip_case():
    model, rng = create_model("tiny", **SMALL_CLIP), np.random.default_rng(0)
    image, text = rng.integers(0, 256, (8, 16, 16, 3), np.uint8), rng.integers(0, 259, (8, 8), np.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), image, text)["params"]
    params = jax.tree.map(lambda s: jnp.asarray(0.2 * rng.standard_normal(s.shape), s.dtype), shapes)

    def encoder(method):
        return lambda params, chunk, rng: model.apply(
            {"params": params}, chunk, train=True, method=method, rngs={"dropout": rng}
        )

    encoders = {"image": encoder("encode_image"), "text": encoder("encode_text")}

    def loss(params, features):
        scale, _ = model.apply({"params": params}, method="logit_scale_and_bias")
        return clip_loss(features["image"], features["text"], scale)

    batch = {"image": image, "text": text}
    return encoders, loss, params | {"logit_scale": jnp.float32(2.0)}, batch


@functools.cache
def clip_direct():
    encoders, loss, params, batch = clip_case()
    return direct(encoders, loss, 4, 2)(params, batch, RNG)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_clip_with_dropout_and_patch_dropout(offload):
    """On two devices, two chunks of two rows each."""
    encoders, loss, params, batch = clip_case()
    sharding = batch_sharding(2)
    f = cached(encoders, loss, offload, chunk_size=4, sharding=sharding)
    assert_equal(f(*place(params, batch, offload, sharding), RNG), clip_direct())


KEPT = {
    "chunks": {"keep": {"image": 2, "text": 100}},
    "names": {"keep_names": ["hidden"]},
    "both": {"keep": {"image": 1, "text": 0}, "keep_names": ["hidden"]},
}


@functools.cache
def mlp_cached(offload, devices, kept=None):
    sharding = batch_sharding(devices)
    options = {} if kept is None else KEPT[kept]
    f = cached(SEPARATE, contrastive, offload, chunk_size=8, sharding=sharding, **options)
    return f(*place(mlp_params(), mlp_batch(28), offload, sharding), RNG)


@pytest.mark.parametrize(
    ("offload", "devices", "kept"),
    [
        *(("none", 4, "chunks"), ("none", 4, "names"), ("host", 1, "chunks"), ("host", 4, "both")),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("none", 4, "both"), ("host", 4, "names"))),
    ],
)
def test_kept_activations_change_nothing(offload, devices, kept):
    """Full chunks and a smaller last one."""
    assert_equal(mlp_cached(offload, devices), mlp_cached(offload, devices, kept), 1e-6)


def test_offloads_of_one_batch_agree_with_replay():
    """A loader that is read twice, in chunks of two sizes, on four devices."""
    params, batch, sharding = mlp_params(), mlp_batch(44), batch_sharding(4)
    sizes, loads = {"image": 16, "text": 24}, []

    def replay(name):
        def load(number):
            loads.append((name, number))
            return batch[name][chunk_rows(number, 44, sizes[name], 4)]

        return Replay(44, load)

    options = {"chunk_size": sizes, "keep": {"image": 1, "text": 2}, "sharding": sharding}
    replayed = cached(SEPARATE, contrastive, "host", **options)(params, {name: replay(name) for name in batch}, RNG)
    assert_equal(replayed, cached(SEPARATE, contrastive, **options)(*place(params, batch, "none", sharding), RNG), 1e-6)
    assert loads == [("image", 0), ("image", 1), ("image", 2), ("text", 0), ("text", 1), ("image", 1), ("image", 2)]


@pytest.mark.parametrize(
    ("offload", "spec", "kind"),
    [
        ("none", "data", AxisType.Auto),
        pytest.param("host", "data", AxisType.Auto, marks=pytest.mark.full),
        ("host", ("host", "data"), AxisType.Auto),
        ("none", ("host", "data"), AxisType.Explicit),
    ],
)
def test_mesh_of_two_axes(offload, spec, kind):
    """The batch is sharded over both, or over one and copied along the other."""
    mesh = jax.make_mesh((2, 2), ("host", "data"), axis_types=(kind, kind))
    sharding = NamedSharding(mesh, P(spec))

    def loss(params, features):
        return clip_loss(features["image"], features["text"], jnp.exp(params["log_scale"]), mesh=mesh, axis_name=spec)

    f = cached(SEPARATE, loss, offload, chunk_size=16, sharding=sharding)
    got = f(*place(mlp_params(), mlp_batch(32), offload, sharding), RNG)
    assert_equal(got, mlp_direct("separate", 32, 16, 2 if spec == "data" else 4))


@pytest.mark.parametrize("offload", ["none", "host"])
def test_pytrees_auxiliary_output_and_entries_without_encoder(offload):
    def encode(params, chunk, rng):
        features = params["w"] * jnp.where(chunk["mask"], chunk["x"], jnp.zeros_like(chunk["x"]))
        return {"first": features, "square": (features**2)[:, None]}

    def loss(params, features):
        value = (features["e"]["first"] * features["weight"]).sum() + features["e"]["square"].sum()
        return value, features["e"]["first"]

    rng = np.random.default_rng(0)
    x, mask, weight = rng.normal(size=10).astype(np.float32), rng.random(10) < 0.5, np.arange(10, dtype=np.float32)
    f = cached({"e": encode}, loss, offload, chunk_size=4, has_aux=True)
    (value, aux), grads = f({"w": jnp.float32(2.0)}, {"e": {"x": x, "mask": mask}, "weight": weight})
    masked = x * mask
    np.testing.assert_allclose(aux, 2 * masked, rtol=1e-6)
    np.testing.assert_allclose(value, (2 * masked * weight).sum() + (4 * masked**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], (masked * weight).sum() + (4 * masked**2).sum(), rtol=1e-5)


@pytest.mark.parametrize("keep", [0, 1000])
@pytest.mark.parametrize("offload", ["none", "host"])
def test_gradients_of_bf16_parameters_are_summed_in_fp32(offload, keep):
    """In bf16, 512 + 2 is 512."""
    f = cached({"e": lambda p, x, _: p * x}, lambda p, f: f["e"].sum(), offload, chunk_size=2, keep=keep)
    rows = np.ones(82, jnp.bfloat16)
    rows[0] = 512
    grad = f(jnp.bfloat16(1), {"e": rows})[1]
    assert grad.dtype == jnp.bfloat16 and grad == 592  # 593, rounded


@pytest.mark.parametrize("offload", ["none", "host"])
def test_frozen_tower(offload):
    """As stop_gradient; the chunks of the frozen tower are read and encoded once."""
    params, batch, calls = mlp_params(), mlp_batch(32), []

    def counted(params, chunk, rng):
        jax.debug.callback(lambda _: calls.append(None), chunk[0, 0])
        return image_tower(params, chunk, rng)

    f = cached({"image": counted, "text": text_tower}, contrastive, offload, chunk_size=8, frozen=("image",))
    got = jax.block_until_ready(f(params, batch, RNG))
    jax.effects_barrier()
    assert len(calls) == 4
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(got[1]["image"]))
    frozen = {"image": lambda p, *args: image_tower(jax.lax.stop_gradient(p), *args), "text": text_tower}
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(direct(frozen, contrastive, 8)(params, batch, RNG)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_frozen_teacher_in_a_second_loss(offload):
    """Texts and a teacher's features have equal shapes; the teacher's are constant."""
    sharding, params, batch = batch_sharding(2), mlp_params(), mlp_batch(40)
    batch["teacher"] = batch["text"][::-1]
    towers = SEPARATE | {"teacher": text_tower}

    def loss(params, features, mesh=None):
        distilled = {"image": features["image"], "text": jax.lax.stop_gradient(features["teacher"])}
        return contrastive(params, features, mesh) + contrastive(params, distilled, mesh)

    sharded_loss = functools.partial(loss, mesh=sharding.mesh)
    f = cached(towers, sharded_loss, offload, chunk_size=8, frozen=("teacher",), sharding=sharding)
    got = f(*place(params, batch, offload, sharding))
    assert_equal(got, direct(towers, loss, 8, 2)(params, batch, None))


@pytest.mark.parametrize(("offload", "devices"), [("none", 2), ("host", 1)])
def test_frozen_parameters(offload, devices):
    """The first layer of the image tower is frozen; the other gradients stay the same."""
    whole, batch, sharding = mlp_params(), mlp_batch(32), batch_sharding(devices)
    trained = {**whole, "image": {"out": whole["image"]["out"]}}

    def joined(variables):
        params, frozen = variables
        return {**params, "image": params["image"] | frozen}

    encoders = {name: lambda v, *args, f=encode: f(joined(v), *args) for name, encode in SEPARATE.items()}
    loss = functools.partial(contrastive, mesh=None if sharding is None else sharding.mesh)
    f = cached(encoders, lambda v, f: loss(joined(v), f), offload, chunk_size=8, keep=1, sharding=sharding)
    placed, rows = place(trained, batch, offload, sharding)
    value, grads = f(placed, rows, RNG, {"in": whole["image"]["in"]})
    expected_value, expected = direct(SEPARATE, contrastive, 8, devices)(whole, batch, RNG)
    assert value == pytest.approx(float(expected_value), rel=1e-6)
    del expected["image"]["in"]
    assert_equal(grads, expected)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_features_computed_beforehand(offload):
    params, batch = mlp_params(), mlp_batch(32)
    batch["image"] = np.asarray(image_tower(params, batch["image"], None))
    got = cached({"text": text_tower}, contrastive, offload, chunk_size=8)(params, batch)
    expected = direct({"text": text_tower}, contrastive, 8)(params, batch, None)
    assert_equal(got[1]["text"], expected[1]["text"])
    assert got[0] == pytest.approx(float(expected[0]), rel=1e-6)
