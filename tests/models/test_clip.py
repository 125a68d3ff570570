"""The dual encoder: features, scale and bias, dtypes, input checks, sharding."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.models import (
    BertConfig,
    build_model,
    clamp_logit_scale,
    create_model,
    l2_normalize,
    model_config,
    normalize_image,
)

SMALL = {
    "vision.image_size": 16,
    "vision.width": 32,
    "vision.layers": 1,
    "text.width": 32,
    "text.layers": 1,
    "text.context_length": 8,
}


def small(**overrides):
    return create_model("tiny", **(SMALL | overrides))


def pairs(n=4):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, 16, 16, 3), dtype=np.uint8), rng.integers(0, 259, (n, 8), dtype=np.int32)


@functools.cache
def variables():
    """Random parameters except initial scale and bias; faster than compiling `init`."""
    model, rng = small(init_logit_bias=-10.0), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *pairs())["params"]
    towers = {name: shapes[name] for name in ("visual", "text")}
    towers = jax.tree.map(lambda s: jnp.asarray(0.2 * rng.standard_normal(s.shape, np.float32)), towers)
    return {"params": towers | model.init(jax.random.key(0), method="logit_scale_and_bias")["params"]}


@functools.cache
def output(dtype="float32"):
    return jax.jit(small(dtype=dtype, init_logit_bias=-10.0).apply)(variables(), *pairs())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_features_have_unit_norm(dtype, tolerance):
    for features in output(dtype)[:2]:
        assert features.shape == (4, 64) and features.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(np.linalg.norm(features.astype(jnp.float32), axis=1), 1.0, atol=tolerance)


def test_encoders_give_the_features_of_the_call():
    image, text = pairs()
    for name, x, want in [("encode_image", image, output().image), ("encode_text", text, output().text)]:
        encode = jax.jit(functools.partial(small().apply, method=name))
        np.testing.assert_allclose(encode(variables(), x), want, rtol=1e-5, atol=1e-6)


def test_each_part_needs_its_own_parameters_alone():
    image, text = pairs()
    params = variables()["params"]
    model = small(init_logit_bias=-10.0)
    jax.eval_shape(lambda p: model.apply({"params": p}, image, method="encode_image"), {"visual": params["visual"]})
    jax.eval_shape(lambda p: model.apply({"params": p}, text, method="encode_text"), {"text": params["text"]})
    rest = {name: params[name] for name in ("logit_scale", "logit_bias")}
    scale, bias = model.apply({"params": rest}, method="logit_scale_and_bias")
    assert (scale, bias) == (output().logit_scale, output().logit_bias)


def test_initial_scale_and_bias():
    assert output().logit_scale == pytest.approx(1 / 0.07)
    assert output().logit_bias == -10.0
    scale, bias = small(init_logit_scale=math.log(10)).apply(
        {"params": {"logit_scale": jnp.float32(math.log(10))}}, method="logit_scale_and_bias"
    )
    assert scale == pytest.approx(10.0) and bias is None
    assert "logit_bias" not in jax.eval_shape(small().init, jax.random.key(0), *pairs())["params"]


def test_bfloat16_compute_keeps_float32_parameters_and_gradients():
    model, (image, text) = small(dtype="bfloat16"), pairs()
    params = {name: value for name, value in variables()["params"].items() if name != "logit_bias"}
    initial = jax.eval_shape(model.init, jax.random.key(0), image, text)["params"]
    assert jax.tree.map(lambda p: (p.shape, p.dtype), params) == jax.tree.map(lambda p: (p.shape, p.dtype), initial)

    def loss(model, params):
        out = model.apply({"params": params}, image, text)
        similarity = out.image.astype(jnp.float32) @ out.text.astype(jnp.float32).T
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(out.logit_scale * similarity)))

    got, want = (jax.jit(jax.grad(functools.partial(loss, m)))(params) for m in (model, small()))
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    got, want = (np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]) for tree in (got, want))
    assert np.dot(got, want) / (np.linalg.norm(got) * np.linalg.norm(want)) > 0.995


def test_feature_dtype_is_independent_of_the_compute_dtype():
    model = small(dtype="bfloat16", feature_dtype="float32")
    features = jax.jit(functools.partial(model.apply, method="encode_text"))(variables(), pairs()[1])
    assert features.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, atol=1e-6)
    assert not np.array_equal(features, features.astype(jnp.bfloat16).astype(jnp.float32))


def test_uint8_images_are_normalized_inside():
    image, _ = pairs()
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    encode = functools.partial(small(image_mean=mean, image_std=std).apply, method="encode_image")
    normalized = ((image / 255.0 - np.array(mean)) / np.array(std)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(encode)(variables(), image), jax.jit(encode)(variables(), normalized), atol=1e-5)
    np.testing.assert_allclose(normalize_image(jnp.asarray(image), mean, std), normalized, rtol=1e-5, atol=1e-6)


def test_l2_normalize_is_safe_at_zero():
    x = jnp.array([[0.0, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(l2_normalize(x, jnp.float32), [[0, 0], [0.6, 0.8]], rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(l2_normalize(x, jnp.float32)))(x)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient[1], [0.032, -0.024], rtol=1e-4)  # (I - u u^T) 1 / |x|


def _scale(log_scale):
    return small().apply({"params": {"logit_scale": log_scale}}, method="logit_scale_and_bias")[0]


def test_the_model_does_not_limit_the_scale():
    """Neither its value nor its gradient, so that a scale above the limit can fall again."""
    for function in (_scale, jax.grad(_scale)):
        assert function(jnp.float32(math.log(117.3))) == pytest.approx(117.3, rel=1e-5)


@pytest.mark.parametrize(
    ("stored", "limit", "clamped"),
    [(-1.0, 100.0, 0.0), (2.5, 100.0, 2.5), (7.0, 100.0, math.log(100)), (7.0, math.inf, 7.0), (-1.0, math.inf, 0.0)],
)
def test_clamp_logit_scale(stored, limit, clamped):
    params = {"logit_scale": jnp.float32(stored), "visual": {"w": jnp.ones(2)}}
    got = jax.jit(clamp_logit_scale, static_argnums=1)(params, limit)
    assert got["logit_scale"] == pytest.approx(clamped, rel=1e-6)
    np.testing.assert_array_equal(got["visual"]["w"], params["visual"]["w"])
    assert params["logit_scale"] == stored


def test_clamp_needs_the_parameters_of_a_model():
    with pytest.raises(ValueError, match=r"with 'logit_scale', got keys \['params'\]"):
        clamp_logit_scale({"params": {}})


@pytest.mark.parametrize(
    ("method", "shape", "dtype", "message"),
    [
        ("encode_image", (2, 32, 32, 3), "uint8", r"images \[b, 16, 16, 3\], got shape \(2, 32, 32, 3\)"),
        ("encode_image", (2, 16, 16, 1), "float32", "images"),
        ("encode_image", (2, 16, 16, 3), "int32", "expected uint8 images .* got dtype int32"),
        ("encode_text", (2, 9), "int32", r"1 <= t <= 8, got shape \(2, 9\)"),
        ("encode_text", (8,), "int32", r"token ids \[b, t\]"),
        ("encode_text", (2, 8), "float32", "integer token ids, got dtype float32"),
    ],
)
def test_bad_inputs_are_refused_when_traced(method, shape, dtype, message):
    apply = functools.partial(small().apply, method=method)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(apply, variables(), jax.ShapeDtypeStruct(shape, dtype))


TOWERS = {
    "clip": {"vision.patch_dropout": 0.5, "vision.dropout": 0.1, "text.dropout": 0.1},
    "siglip": {"vision.pool": "map", "vision.class_token": False, "text.causal": False, "text.pool": "last"},
    "bert": {"text": BertConfig(width=32, layers=1, heads=2, vocab_size=259, context_length=8, dropout=0.1)},
}


@pytest.mark.parametrize("name", TOWERS)
def test_data_parallel_encoding_needs_no_communication(name):
    """Pooling, token lookup, padding masks, dropout and patch dropout need no communication on sharded batches."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.sharding.NamedSharding(mesh, jax.P("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    overrides = {key: value for key, value in TOWERS[name].items() if "." in key}
    towers = {key: value for key, value in TOWERS[name].items() if "." not in key}
    model = build_model(dataclasses.replace(model_config("tiny", **(SMALL | overrides)), **towers))
    shapes = jax.eval_shape(model.init, jax.random.key(0), *pairs())

    @functools.partial(jax.jit, in_shardings=(everywhere, batch, batch), out_shardings=(batch, batch))
    def encode(variables, image, text):
        return model.apply(variables, image, text, train=True, rngs={"dropout": jax.random.key(0)})[:2]

    hlo = encode.lower(shapes, *pairs(16)).compile().as_text()
    assert "num_partitions=8" in hlo
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in hlo
