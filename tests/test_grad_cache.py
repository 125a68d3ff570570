"""Gradient caching against the direct gradient, and what it promises about memory, communication and work."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from infcl_jax import Replay, cached_value_and_grad, chunk_rows, clip_loss, pairwise_scores_lse
from infcl_jax.models import create_model

RNG = jax.random.key(7)
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


def mlp(params, chunk, rng):
    hidden = jnp.tanh(chunk @ params["in"])
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.8, hidden.shape), hidden / 0.8, jnp.zeros_like(hidden))
    features = hidden @ params["out"]
    return features / jnp.linalg.norm(features, axis=1, keepdims=True)


def image_tower(params, chunk, rng):
    return mlp(params["image"], chunk, rng)


def text_tower(params, chunk, rng):
    return mlp(params["text"], chunk, rng)


SEPARATE = {"image": image_tower, "text": text_tower}
TOWERS = {"separate": SEPARATE, "tied": {"image": image_tower, "text": image_tower}}


def mlp_params(width=32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(8, width), (width, 16)] * 2
    weights = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return {
        "image": dict(zip(("in", "out"), weights[:2], strict=True)),
        "text": dict(zip(("in", "out"), weights[2:], strict=True)),
        "log_scale": jnp.float32(2.0),
    }


def mlp_batch(rows):
    rng = np.random.default_rng(rows)
    return {name: rng.normal(size=(rows, 8)).astype(np.float32) for name in ("image", "text")}


def contrastive(params, features, mesh=None):
    image, text, scale = features["image"], features["text"], jnp.exp(params["log_scale"])
    if mesh is not None:
        return clip_loss(image, text, scale, mesh=mesh)
    logits = scale * (image @ text.T)
    both = jax.nn.logsumexp(logits, axis=0) + jax.nn.logsumexp(logits, axis=1)
    return (both / 2 - jnp.diagonal(logits)).mean()


def batch_sharding(devices):
    return None if devices == 1 else NamedSharding(oracle.mesh_of(devices), P("data"))


def direct(encoders, loss_fn, chunk_size, devices=1):
    """The jitted value and gradient without a cache: what the devices do side by side in one vmap."""

    def total(params, batch, rng):
        features = dict(batch)
        for encoder, (name, encode) in enumerate(encoders.items()):
            blocks, size = batch[name].reshape(devices, -1, *batch[name].shape[1:]), chunk_size // devices
            starts, chunks = range(0, blocks.shape[1], size), []
            for number, start in enumerate(starts):
                shares = np.arange(devices) * len(starts) + number
                keys = rng
                if rng is not None:
                    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(rng, encoder), shares)
                chunk = blocks[:, start : start + size]
                chunks.append(jax.vmap(encode, (None, 0, None if rng is None else 0))(params, chunk, keys))
            features[name] = jnp.concatenate(chunks, axis=1).reshape(len(batch[name]), -1)
        return loss_fn(params, features)

    return jax.jit(jax.value_and_grad(total))


def cached(encoders, loss_fn, residency="device", **options):
    f = cached_value_and_grad(encoders, loss_fn, residency=residency, **options)
    return jax.jit(f) if residency == "device" else f


def place(params, batch, residency, sharding):
    """Parameters and batch where a trainer would have them."""
    if sharding is None:
        return params, batch
    params = jax.device_put(params, NamedSharding(sharding.mesh, P()))
    return params, jax.device_put(batch, sharding) if residency == "device" else batch


def assert_equal(got, expected, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(a, b) <= tolerance


@functools.cache
def mlp_direct(towers, rows, chunk_size, devices):
    return direct(TOWERS[towers], contrastive, chunk_size, devices)(mlp_params(), mlp_batch(rows), RNG)


@pytest.mark.parametrize(("towers", "rows"), [("separate", 44), ("tied", 32)])
@pytest.mark.parametrize(("residency", "devices"), [("device", 1), ("device", 4), ("host", 1), ("host", 4)])
def test_equals_the_direct_gradient(residency, devices, towers, rows):
    sharding = batch_sharding(devices)
    loss = functools.partial(contrastive, mesh=None if sharding is None else sharding.mesh)
    f = cached(TOWERS[towers], loss, residency, chunk_size=16, sharding=sharding)
    got = f(*place(mlp_params(), mlp_batch(rows), residency, sharding), RNG)
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


@pytest.mark.parametrize("residency", ["device", "host"])
def test_clip_with_dropout_and_patch_dropout(residency):
    """On two devices, two chunks of two rows each."""
    encoders, loss, params, batch = clip_case()
    sharding = batch_sharding(2)
    f = cached(encoders, loss, residency, chunk_size=4, sharding=sharding)
    assert_equal(f(*place(params, batch, residency, sharding), RNG), clip_direct())


@pytest.mark.parametrize(("residency", "devices"), [("device", 4), ("host", 1)])
def test_kept_activations_change_nothing(residency, devices):
    sharding = batch_sharding(devices)
    args = (*place(mlp_params(), mlp_batch(32), residency, sharding), RNG)
    results = [
        cached(SEPARATE, contrastive, residency, chunk_size=8, keep=keep, sharding=sharding)(*args)
        for keep in (0, {"image": 2, "text": 100})
    ]
    assert_equal(*results, 1e-6)


@pytest.mark.parametrize("residency", ["device", "host"])
def test_keeping_everything_encodes_once(residency):
    """Encodings per chunk, counted as they run."""
    calls = []

    def counted(params, chunk, rng):
        jax.debug.callback(lambda _: calls.append(None), chunk[0, 0])
        return image_tower(params, chunk, rng)

    counts = []
    for keep in (0, 2, 4):
        calls.clear()
        f = cached({"image": counted}, lambda p, f: f["image"].sum(), residency, chunk_size=8, keep=keep)
        jax.block_until_ready(f(mlp_params(), mlp_batch(32)))
        jax.effects_barrier()
        counts.append(len(calls))
    assert counts == [8, 6, 4]


@pytest.mark.parametrize("residency", ["device", "host"])
def test_twenty_optimizer_steps(residency):
    tx, batch = optax.sgd(0.1, momentum=0.9), mlp_batch(32)
    update = jax.jit(lambda grads, state, params: tx.update(grads, state, params))

    def train(f):
        params, losses = mlp_params(), []
        state = tx.init(params)
        for step in range(20):
            loss, grads = f(params, batch, jax.random.fold_in(RNG, step))
            losses.append(float(loss))
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, losses

    params, losses = train(cached(SEPARATE, contrastive, residency, chunk_size=16))
    assert losses[-1] < 0.8 * losses[0]
    assert_equal(params, train(direct(SEPARATE, contrastive, 16))[0], 1e-5)


def test_residencies_of_one_batch_agree_with_replay():
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
    assert_equal(
        replayed, cached(SEPARATE, contrastive, **options)(*place(params, batch, "device", sharding), RNG), 1e-6
    )
    assert loads == [("image", 0), ("image", 1), ("image", 2), ("text", 0), ("text", 1), ("image", 1), ("image", 2)]


@pytest.mark.parametrize(
    ("residency", "spec", "kind"),
    [
        ("device", "data", AxisType.Auto),
        ("host", "data", AxisType.Auto),
        ("host", ("host", "data"), AxisType.Auto),
        ("device", ("host", "data"), AxisType.Explicit),
    ],
)
def test_mesh_of_two_axes(residency, spec, kind):
    """The batch is sharded over both, or over one and copied along the other."""
    mesh = jax.make_mesh((2, 2), ("host", "data"), axis_types=(kind, kind))
    sharding = NamedSharding(mesh, P(spec))

    def loss(params, features):
        return clip_loss(features["image"], features["text"], jnp.exp(params["log_scale"]), mesh=mesh, axis_name=spec)

    f = cached(SEPARATE, loss, residency, chunk_size=16, sharding=sharding)
    got = f(*place(mlp_params(), mlp_batch(32), residency, sharding), RNG)
    assert_equal(got, mlp_direct("separate", 32, 16, 2 if spec == "data" else 4))


def test_rows_stay_on_their_devices():
    """The only communication: one sum of the gradients after the loops, and what the loss does."""
    sharding = batch_sharding(4)
    params, batch = place(mlp_params(), mlp_batch(32), "device", sharding)

    def compiled(loss):
        return cached(SEPARATE, loss, chunk_size=8, sharding=sharding).lower(params, batch, RNG).compile().as_text()

    hlo = compiled(lambda params, f: jnp.exp(params["log_scale"]) * jnp.sum(f["image"] * f["text"]))
    assert "all-gather" not in hlo and "all-to-all" not in hlo and "collective-permute" not in hlo
    computations = {c.split(" ", 1)[0].lstrip("%"): c for c in hlo.split("\n\n") if c.strip()}
    bodies = re.findall(r"body=%?([\w.\-]+)", hlo)
    assert bodies and "all-reduce" in hlo
    assert not any("all-reduce" in computations[body] for body in bodies)
    hlo = compiled(functools.partial(contrastive, mesh=sharding.mesh))
    assert "all-gather" not in hlo and "all-to-all" not in hlo


@pytest.mark.parametrize("residency", ["device", "host"])
def test_pytrees_auxiliary_output_and_entries_without_encoder(residency):
    def encode(params, chunk, rng):
        features = params["w"] * jnp.where(chunk["mask"], chunk["x"], jnp.zeros_like(chunk["x"]))
        return {"first": features, "square": (features**2)[:, None]}

    def loss(params, features):
        value = (features["e"]["first"] * features["weight"]).sum() + features["e"]["square"].sum()
        return value, features["e"]["first"]

    rng = np.random.default_rng(0)
    x, mask, weight = rng.normal(size=10).astype(np.float32), rng.random(10) < 0.5, np.arange(10, dtype=np.float32)
    f = cached({"e": encode}, loss, residency, chunk_size=4, has_aux=True)
    (value, aux), grads = f({"w": jnp.float32(2.0)}, {"e": {"x": x, "mask": mask}, "weight": weight})
    masked = x * mask
    np.testing.assert_allclose(aux, 2 * masked, rtol=1e-6)
    np.testing.assert_allclose(value, (2 * masked * weight).sum() + (4 * masked**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], (masked * weight).sum() + (4 * masked**2).sum(), rtol=1e-5)


@pytest.mark.parametrize("keep", [0, 1000])
@pytest.mark.parametrize("residency", ["device", "host"])
def test_gradients_of_bf16_parameters_are_summed_in_fp32(residency, keep):
    """In bf16, a sum of ones stops at 256."""
    f = cached({"e": lambda p, x, _: p * x}, lambda p, f: f["e"].sum(), residency, chunk_size=2, keep=keep)
    grad = f(jnp.bfloat16(1), {"e": np.ones(640, jnp.bfloat16)})[1]
    assert grad.dtype == jnp.bfloat16 and grad == 640


@pytest.mark.parametrize("residency", ["device", "host"])
def test_frozen_tower(residency):
    """As stop_gradient; the chunks of the frozen tower are read and encoded once."""
    params, batch, calls = mlp_params(), mlp_batch(32), []

    def counted(params, chunk, rng):
        jax.debug.callback(lambda _: calls.append(None), chunk[0, 0])
        return image_tower(params, chunk, rng)

    f = cached({"image": counted, "text": text_tower}, contrastive, residency, chunk_size=8, frozen=("image",))
    got = jax.block_until_ready(f(params, batch, RNG))
    jax.effects_barrier()
    assert len(calls) == 4
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(got[1]["image"]))
    frozen = {"image": lambda p, *args: image_tower(jax.lax.stop_gradient(p), *args), "text": text_tower}
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(direct(frozen, contrastive, 8)(params, batch, RNG)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("residency", ["device", "host"])
def test_features_computed_beforehand(residency):
    params, batch = mlp_params(), mlp_batch(32)
    batch["image"] = np.asarray(image_tower(params, batch["image"], None))
    got = cached({"text": text_tower}, contrastive, residency, chunk_size=8)(params, batch)
    expected = direct({"text": text_tower}, contrastive, 8)(params, batch, None)
    assert_equal(got[1]["text"], expected[1]["text"])
    assert got[0] == pytest.approx(float(expected[0]), rel=1e-6)


def temporary_bytes(rows, chunk_size, keep=0, width=512):
    """Of one compiled step whose hidden layer is the only large activation."""
    f = cached(SEPARATE, lambda p, f: (f["image"] * f["text"]).sum() * p["log_scale"], chunk_size=chunk_size, keep=keep)
    batch = {name: jax.ShapeDtypeStruct((rows, 8), jnp.float32) for name in ("image", "text")}
    params = jax.eval_shape(lambda: mlp_params(width))
    return f.lower(params, batch, RNG).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_batch():
    features = 4 * 16 * 4  # two towers' features and their gradients, bytes per row
    small, large = (temporary_bytes(rows, 64) for rows in (1024, 16384))
    assert large - small < 2 * features * (16384 - 1024)
    assert 4 * large < temporary_bytes(16384, 16384)


def test_kept_activations_hold_no_weights():
    """A chunk of one row keeps little more than a row of activations, not the weights it was multiplied with."""
    rows, width = 16, 8192
    grown = temporary_bytes(rows, 1, keep=rows, width=width) - temporary_bytes(rows, 1, keep=2, width=width)
    assert grown < 2 * rows * 6 * 4 * width  # the weights of one tower would be 24 such rows


def test_host_form_waits_for_room():
    """Chunks are read when there is room for them, not all at once: in the pace at which they are computed."""
    times, alive = [], []

    def slow(params, chunk, rng):
        return chunk[:, :2] + jax.lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ params), params)[:1, :2]

    def load(number):
        times.append(time.monotonic())
        alive.append(sum(array.shape == (5, 3) for array in jax.live_arrays()))
        return np.ones((5, 3), np.float32)

    f = cached({"e": slow}, lambda p, f: f["e"].sum(), "host", chunk_size=5)
    for _ in range(2):  # the first call compiles
        times.clear()
        jax.block_until_ready(f(jnp.ones((400, 400)), {"e": Replay(60, load)}))
        times.append(time.monotonic())
    first, second = np.diff(times[:12]).sum(), np.diff(times[12:24]).sum()
    assert len(times) == 25 and max(alive) <= 2
    assert first > 0.5 * (times[12] - times[0]) and second > 0.5 * (times[24] - times[12])


def test_host_form_compiles_the_encoder_for_a_chunk_not_for_a_batch():
    traces = []

    def traced(params, chunk, rng):
        traces.append(chunk.shape)
        return image_tower(params, chunk, rng)

    f = cached({"e": traced}, lambda p, f: f["e"].sum(), "host", chunk_size=8, keep=1)
    first = [f(mlp_params(), {"e": mlp_batch(rows)["image"]}, RNG) and len(traces) for rows in (16, 16, 64)]
    assert first[0] == first[1] == first[2]


def scores(params, x, y):
    return jnp.tanh((x @ params["x"])[:, None] + (y @ params["y"])[None]) @ params["out"]


def pair_case(dtype):
    rng = np.random.default_rng(0)
    params = {"x": rng.normal(size=(8, 16)), "y": rng.normal(size=(8, 16)), "out": 10 * rng.normal(size=16)}
    values = params, rng.normal(size=(37, 8)), rng.normal(size=(50, 8))
    return jax.tree.map(lambda a: jnp.asarray(a.astype(np.float32), dtype), values)


def pair_gradients(pairs, dtype, labels):
    """A loss with another weight for every result, and its gradients over the network and both sides."""
    row, col, positive = (jnp.asarray(w, dtype) for w in np.random.default_rng(1).normal(size=(3, 50)))

    def loss(params, x, y):
        found = pairs(params, x, y, labels)
        return (row[:37] * found[0]).sum() + (col * found[1]).sum() + (positive[:37] * found[2]).sum()

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*pair_case(dtype)))


def dense_pairs(params, x, y, labels):
    s = scores(params, x, y)
    labels = np.arange(len(x)) if labels is None else labels
    return jax.nn.logsumexp(s, axis=1), jax.nn.logsumexp(s, axis=0), s[np.arange(len(x)), labels]


@pytest.mark.parametrize("labels", [None, np.random.default_rng(2).permutation(50)[:37].astype(np.int32)])
@pytest.mark.parametrize("tile", [(8, 16), 1, 37, 100])
def test_pair_scores_against_float64(tile, labels):
    def tiled(params, x, y, labels):
        return pairwise_scores_lse(scores, params, x, y, tile=tile, labels=labels)

    with jax.enable_x64(True):
        expected = pair_gradients(dense_pairs, jnp.float64, labels)
    assert_equal(pair_gradients(tiled, jnp.float32, labels), expected)


def test_pair_scores_leave_out_what_is_minus_infinity():
    def masked(params, x, y):
        return jnp.where((y[:, 0] > 0)[None, :], scores(params, x, y), -jnp.inf)

    params, x, y = pair_case(jnp.float32)
    y = y.at[:37, 0].set(abs(y[:37, 0])).at[37:, 0].set(-1.0)

    def loss(pairs):
        return jax.value_and_grad(lambda params: (lambda s: (s.row - s.positive).mean())(pairs(params)))(params)

    got = loss(lambda params: pairwise_scores_lse(masked, params, x, y, tile=16))
    assert_equal(got, loss(lambda params: pairwise_scores_lse(scores, params, x, y[:37], tile=16)))


def test_pair_scores_hold_one_tile():
    def temporary(b):
        params, x, y = jax.eval_shape(lambda: pair_case(jnp.float32))
        x, y = (jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype) for a in (x, y))
        loss = jax.grad(lambda *args: pairwise_scores_lse(scores, *args, tile=64).row.sum(), argnums=(0, 1, 2))
        return jax.jit(loss).lower(params, x, y).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 2 * temporary(512) < 512 * 512 * 16 * 4


MLP = {"encoders": SEPARATE, "loss_fn": contrastive, "chunk_size": 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoders": {}}, "at least one encoder"),
        ({"chunk_size": 0}, "chunk_size of 'image' to be an integer of at least 1, got 0"),
        ({"chunk_size": 4.0}, "chunk_size of 'image' to be an integer"),
        ({"chunk_size": {"image": 8}}, r"chunk_size for every encoder, got none for \['text'\]"),
        (
            {"chunk_size": {"image": 8, "text": 8, "audio": 8}},
            r"chunk_size to name .*\['image', 'text'\], got \['audio'\]",
        ),
        ({"keep": -1}, "keep of 'image' to be an integer of at least 0, got -1"),
        ({"keep": {"audio": 1}}, r"keep to name encoders .* got \['audio'\]"),
        ({"frozen": ("audio",)}, r"frozen to name encoders .* got \['audio'\]"),
        ({"frozen": "image"}, "frozen to be a collection of names, got 'image'"),
        ({"residency": "disk"}, r"residency to be one of \('device', 'host'\), got 'disk'"),
        ({"sharding": P("data")}, "sharding to be a NamedSharding of the leading axis alone"),
        (
            {"sharding": NamedSharding(Mesh(np.array(jax.devices()[:1]), "d"), P(None))},
            "sharding to be a NamedSharding",
        ),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        cached_value_and_grad(**(MLP | options))


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"batch": {"image": np.zeros((8, 8))}}, r"got \['image'\] without \['text'\]"),
        ({}, {"batch": {"image": [np.zeros((8, 8)), np.zeros((7, 8))]}}, "common leading axis in batch entry 'image'"),
        ({}, {"batch": {"image": np.float32(0)}}, r"leading axis in batch entry 'image', got shapes \[\(\)\]"),
        ({}, {"batch": {"image": np.zeros((0, 8))}}, "rows of image that 1 devices can share evenly, got 0"),
        ({}, {"batch": {"image": Replay(8, None)}}, r"with residency 'device', got Replay for \['image'\]"),
        ({"residency": "host"}, {"batch": {"mask": Replay(8, None)}}, r"without an encoder, got Replay for \['mask'\]"),
        ({"residency": "host"}, {"batch": {"image": Replay(16, lambda _: np.zeros((3, 8)))}}, r"8 rows from load\(0\)"),
        (
            {"sharding": 4},
            {"batch": {"image": np.zeros((6, 8))}},
            "rows of image that 4 devices can share evenly, got 6",
        ),
        ({"sharding": 4, "chunk_size": 6}, {}, "chunk_size of image that 4 devices can share evenly, got 6"),
        ({}, {"params": {"image": jnp.int32(1)}}, r"floating parameters, got int32 at \['image'\]"),
        ({}, {"rng": 3}, "rng to be one PRNG key"),
        ({}, {"rng": jax.random.split(RNG)}, "rng to be one PRNG key"),
        ({"loss_fn": lambda p, f: f["image"]}, {}, r"loss_fn to return a floating scalar, got float32\[16, 16\]"),
        ({"encoders": {"image": lambda p, x, _: x[:3]}}, {}, "features with 8 rows for 8 rows, got float32"),
        ({"encoders": {"image": lambda p, x, _: x > 0}}, {}, "encoder 'image' to return floating features"),
    ],
)
def test_calls_that_do_not_fit(options, changes, message):
    if "sharding" in options:
        options = options | {"sharding": batch_sharding(options["sharding"])}
    batch = mlp_batch(16) | changes.get("batch", {})
    batch = changes["batch"] if set(changes.get("batch", ())) == {"image"} and "without" in message else batch
    with pytest.raises(ValueError, match=message):
        cached_value_and_grad(**(MLP | options))(changes.get("params", mlp_params()), batch, changes.get("rng"))


def test_host_form_cannot_be_traced():
    f = cached_value_and_grad(**MLP, residency="host")
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda params: f(params, mlp_batch(16)))(mlp_params())


@pytest.mark.parametrize(
    ("number", "expected"), [(0, [0, 1, 6, 7]), (1, [2, 3, 8, 9]), (2, [4, 5, 10, 11]), (3, None), (-1, None)]
)
def test_rows_of_a_chunk(number, expected):
    if expected is None:
        with pytest.raises(ValueError, match="0 to 2"):
            chunk_rows(number, 12, 4, 2)
    else:
        assert chunk_rows(number, 12, 4, 2).tolist() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": 0}, "one or two positive integers, got 0"),
        ({"tile": (1, 2, 3)}, "one or two positive integers"),
        ({"x": np.zeros((3, 8), np.int32)}, "x and y to be floating, got int32"),
        ({"x": np.zeros((60, 8), np.float32)}, "60 and 50 rows"),
        ({"labels": np.full(37, 50, np.int32)}, r"labels in \[0, 50\)"),
        ({"score_fn": lambda p, x, y: x[:, 0]}, r"floating scores \[16, 16\] for a tile, got float32\[16\]"),
    ],
)
def test_pairs_that_do_not_fit(changes, message):
    params, x, y = pair_case(jnp.float32)
    arguments = {"score_fn": scores, "params": params, "x": x, "y": y, "tile": 16} | changes
    with pytest.raises(ValueError, match=message):
        pairwise_scores_lse(**arguments)
