"""`verify` passes right set-ups, and finds and names planted mistakes."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P

from infcl_jax import clip_loss, matryoshka, retrieval_loss, siglip_loss, verify
from infcl_jax.verification import VerificationError

ROWS, CHUNK, DEVICES, DIM = 32, 16, 4, 6  # 2 chunks on 4 devices: no power of one number is one of the other
CHUNKS = ROWS // CHUNK
RNG = jax.random.key(3)


def encode(name, params, rows, rng):
    hidden = jnp.tanh(rows @ params[name])
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.8, hidden.shape), hidden, 0)
    return hidden / jnp.sqrt(1e-3 + jnp.sum(hidden * hidden, axis=1, keepdims=True))


def centered(params, rows, rng):
    return encode("image", params, rows - rows.mean(axis=0, keepdims=True), rng)


ENCODERS = {name: functools.partial(encode, name) for name in ("image", "text")}


def loss(params, features, mesh=None, implementation=None):
    scale = jnp.exp(params["scale"])
    return clip_loss(features["image"], features["text"], scale, mesh=mesh, implementation=implementation)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    weights = {name: jnp.asarray(rng.standard_normal((5, DIM)), jnp.float32) for name in ENCODERS}
    return weights | {"scale": jnp.float32(2.0)}


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal((ROWS, 5)).astype(np.float32) for name in ENCODERS}


def two_passes(params, batch, rng=None, *, merge=sum, keys=(0, 0), cast=lambda f: f, loss=loss):
    """Gradient caching by hand on one device.

    With zeros as `keys`, the random keys are those of `cached_value_and_grad`.
    """
    slices = [slice(first, first + CHUNK) for first in range(0, len(batch["image"]), CHUNK)]

    def encode_chunk(params, number, offset):
        features = {}
        for index, (name, encoder) in enumerate(ENCODERS.items()):
            key = None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, index + offset), number)
            features[name] = cast(encoder(params, batch[name][slices[number]], key))
        return features

    chunks = [encode_chunk(params, number, keys[0]) for number in range(len(slices))]
    features = {name: jnp.concatenate([chunk[name] for chunk in chunks]) for name in ENCODERS}
    value, (own, cotangents) = jax.value_and_grad(loss, argnums=(0, 1))(params, features)
    grads = []
    for number, rows in enumerate(slices):
        pullback = jax.vjp(lambda p, number=number: encode_chunk(p, number, keys[1]), params)[1]
        grads.append(pullback({name: d[rows] for name, d in cotangents.items()})[0])
    return value, jax.tree.map(lambda first, *chunked: first + merge(chunked), own, *grads)


def accumulated(params, batch):
    """Gradient accumulation, whose chunks are not compared with each other."""
    results = []
    for i in range(CHUNKS):
        rows = {name: a[i * CHUNK : (i + 1) * CHUNK] for name, a in batch.items()}

        def of_chunk(params, rows=rows):
            return loss(params, {name: e(params, rows[name], None) for name, e in ENCODERS.items()})

        results.append(jax.value_and_grad(of_chunk)(params))
    return jax.tree.map(lambda *a: sum(a) / CHUNKS, *results)


def inside(params, batch, *, axis_name="data", reduce, check_vma=True, devices=DEVICES):
    """Gradients taken inside `shard_map`."""

    def block(params, batch):
        def value(params):
            features = {name: e(params, batch[name], None) for name, e in ENCODERS.items()}
            return clip_loss(*features.values(), jnp.exp(params["scale"]), axis_name=axis_name)

        if check_vma:
            params = jax.lax.pcast(params, "data", to="varying")
        return reduce(jax.value_and_grad(value)(params))

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(block, mesh=oracle.mesh_of(devices), **specs)(params, batch)


def mean(tree):
    return jax.lax.pmean(tree, "data")


def summed_gradients(result):
    return jax.lax.pmean(result[0], "data"), jax.lax.psum(result[1], "data")


def first_of(result):
    """Keep the result of the first device."""
    return jax.tree.map(lambda a: jax.lax.psum(jnp.where(jax.lax.axis_index("data") == 0, a, 0), "data"), result)


def stopped(params, features):
    return loss(params, features | {"text": jax.lax.stop_gradient(features["text"])})


def summed(result):
    return jax.lax.psum(result[0], "data"), jax.lax.psum(result[1], "data")


def overwritten(params, batch):
    """Gradients of the last chunk alone."""
    return two_passes(params, batch, merge=lambda chunks: chunks[-1])


def nearly(params, batch):
    value, grads = two_passes(params, batch)
    return value, grads | {"text": grads["text"] + 0.1 * grads["text"][::-1]}


def on_chunks(**changes):
    return {"chunk_size": CHUNK}, functools.partial(two_passes, **changes)


def on_devices(**changes):
    return {"devices": DEVICES}, functools.partial(inside, **changes)


def to_fp32(features):
    return features.astype(jnp.float32)


def mean_of_chunks(chunks):
    return sum(chunks) / len(chunks)


slow, full = pytest.mark.slow, pytest.mark.full
MISTAKES = [
    ("mean_over_chunks", *on_chunks(merge=mean_of_chunks)),
    ("low_precision", *on_chunks(cast=lambda f: f.astype(jnp.bfloat16))),
    ("random_key", {"chunk_size": CHUNK, "rng": RNG}, functools.partial(two_passes, keys=(0, 7))),
    ("psum_too_many", *on_devices(check_vma=False, reduce=summed_gradients)),
    ("psum_too_few", *on_devices(reduce=mean)),
    ("missing_axis_name", *on_devices(axis_name=(), reduce=mean)),
    ("batch_statistics", {"chunk_size": CHUNK, "encoders": {**ENCODERS, "image": centered}}, None),
    pytest.param("missing_axis_name", *on_devices(axis_name=(), reduce=summed), marks=full),
    pytest.param("psum_too_few", *on_devices(reduce=first_of), marks=full),
    pytest.param(
        "psum_too_few",
        {"devices": 2, "chunk_size": CHUNK},
        functools.partial(inside, reduce=mean, devices=2),
        marks=full,
    ),
    pytest.param("chunk_overwritten", {"chunk_size": CHUNK}, overwritten, marks=slow),
    pytest.param("chunk_losses", {"chunk_size": CHUNK}, accumulated, marks=slow),
    pytest.param("no_gradient", *on_chunks(loss=stopped), marks=slow),
    pytest.param("not_finite", *on_chunks(merge=lambda chunks: sum(chunks) * jnp.nan), marks=slow),
    pytest.param("scaled", *on_chunks(merge=lambda chunks: 0.7 * sum(chunks)), marks=slow),
    pytest.param("unknown", {"chunk_size": CHUNK}, nearly, marks=slow),
    # Below the rounding error of fp32, to which the set-up casts.
    pytest.param("low_precision", {"chunk_size": CHUNK, "rtol": 1e-12}, on_chunks(cast=to_fp32)[1], marks=full),
    pytest.param(
        "mean_over_chunks",
        {"chunk_size": CHUNK, "rtol": 1e-12},
        on_chunks(cast=to_fp32, merge=mean_of_chunks)[1],
        marks=full,
    ),
]


def run(params, batch, function, devices=1, encoders=ENCODERS, loss=loss, **options):
    mesh = oracle.mesh_of(devices) if devices > 1 else None
    function = function and jax.jit(function)
    return verify(loss, encoders, params, batch, value_and_grad=function, mesh=mesh, **options)


@pytest.mark.parametrize(("name", "options", "function"), MISTAKES)
def test_a_planted_mistake_is_found_and_named(name, options, function, params, batch):
    report = run(params, batch, function, **options)
    assert [cause.name for cause in report.causes] == [name], str(report)
    assert not report.ok and report.verdict == f"wrong: {name}"


def with_default(params, batch, merge=sum):
    return two_passes(params, batch, merge=merge)


RIGHT = [
    ({"chunk_size": CHUNK, "rng": RNG}, two_passes),
    ({"chunk_size": CHUNK}, with_default),
    ({"devices": DEVICES, "chunk_size": CHUNK, "rng": RNG}, None),
    pytest.param(*on_devices(reduce=summed_gradients), marks=slow),
]


@pytest.mark.parametrize(("options", "function"), RIGHT)
def test_a_right_set_up_passes(options, function, params, batch):
    report = run(params, batch, function, **options)
    assert report.ok and report.verdict.startswith("right") and not report.notes, str(report)
    assert [group.name for group in report.groups] == ["image", "scale", "text"]
    assert max(group.error for group in report.groups) < 1e-4


class Towers(eqx.Module):
    image: jax.Array
    text: jax.Array
    scale: jax.Array

    def __getitem__(self, name):
        return getattr(self, name)


def test_a_module_has_groups_and_a_shard_map_needs_no_wrapper(params, batch):
    def constant(module, rows, rng):  # ignores its parameters
        return encode("image", params, rows, rng)

    def block(module, batch):
        return clip_loss(constant(module, batch["image"], None), encode("text", module, batch["text"], None), 14.3)

    mesh = oracle.mesh_of(1)
    loop = jax.shard_map(jax.value_and_grad(block), mesh=mesh, in_specs=(P(), P()), out_specs=P())

    def loss(module, features):
        return clip_loss(features["image"], features["text"], 14.3)

    report = verify(loss, ENCODERS, Towers(**params), batch, value_and_grad=loop)
    assert [(group.name, group.error <= 1e-3) for group in report.groups] == [
        ("image", False),
        ("text", True),
        ("scale", True),
    ]
    assert [cause.name for cause in report.causes] == ["no_gradient"], str(report)


def test_other_random_keys_are_no_mistake(params, batch):
    report = run(params, batch, functools.partial(two_passes, keys=(7, 7)), chunk_size=CHUNK, rng=RNG)
    assert report.ok and "not those of cached_value_and_grad" in report.notes[0], str(report)


LIBRARY = {
    "clip": clip_loss,
    "siglip": lambda image, text, scale, **options: siglip_loss(image, text, scale, -5.0, **options),
    "retrieval": retrieval_loss,
    "matryoshka": matryoshka(clip_loss, (2, 4, DIM)),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, implementation, marks=slow)
        for name, implementation in zip(LIBRARY, ("xla", "ring", "disco", "local"), strict=True)
    ],
)
def test_the_losses_of_the_library_pass(name, implementation, params, batch):
    def loss(params, features, mesh=None, implementation=None):
        implementation = None if name == "siglip" and implementation == "dense" else implementation
        scale = jnp.exp(params["scale"])
        return LIBRARY[name](features["image"], features["text"], scale, mesh=mesh, implementation=implementation)

    report = run(
        params, batch, None, loss=loss, devices=DEVICES, chunk_size=CHUNK, implementation=implementation, strict=True
    )
    assert report.ok


@pytest.mark.parametrize(
    ("update", "name"),
    [
        (lambda params, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), "frozen_moved"),
        (lambda params, grads: jax.tree.map(lambda p: 0.9 * p, params), "frozen_moved"),
        (lambda params, grads: params, "trained_still"),
        (lambda params, grads: params | {n: params[n] - grads[n] for n in ("image", "scale")}, None),
    ],
)
def test_the_update_moves_trained_groups_alone(update, name, params, batch):
    def from_table(params, batch):  # the gradients of the update alone matter here
        return expected(params, batch)

    report = verify(loss, ENCODERS, params, batch, value_and_grad=from_table, update=update, frozen=["text"])
    assert [cause.name for cause in report.causes] == ([name] if name else []), str(report)
    assert [group.name for group in report.groups] == ["image", "scale"]


@functools.partial(jax.jit)
def expected(params, batch):
    return jax.value_and_grad(lambda p: loss(p, {n: e(p, batch[n], None) for n, e in ENCODERS.items()}))(params)


def test_the_report_has_a_table_and_a_figure(params, batch, tmp_path):
    wrong = functools.partial(two_passes, merge=mean_of_chunks)
    with pytest.raises(VerificationError, match=r"(?s)^expected a set-up that equals .*mean_over_chunks: ") as error:
        run(params, batch, wrong, chunk_size=CHUNK, strict=True)
    rows = {line.split()[0]: line.split()[1:] for line in str(error.value).splitlines() if line.strip()}
    assert float(rows["image"][1]) == pytest.approx(0.5, abs=1e-3) and float(rows["text"][2]) == pytest.approx(0.5)
    right = run(params, batch, None)
    figure = right.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").exists()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["loss", "image", "scale", "text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rtol": 0}, "^expected 0 < rtol < 1"),
        ({"implementation": "fast"}, "^expected implementation"),
        ({"encoders": {}}, "^expected encoders with a batch entry each"),
        ({"encoders": {"audio": None}}, "^expected encoders with a batch entry each"),
        ({"frozen": ["audio"]}, "^expected frozen to name groups among"),
        ({"chunk_size": 6, "devices": 4}, "chunk_size of the batch that 4 devices can share evenly"),
        ({"rng": RNG, "function": lambda params, batch: None}, "^expected value_and_grad to take rng"),
        ({"function": lambda params, batch: (jnp.zeros(()), ())}, "^expected gradients of the structure of params"),
    ],
)
def test_arguments_that_do_not_fit(options, message, params, batch):
    with pytest.raises(ValueError, match=message):
        run(params, batch, options.pop("function", None), **options)
