"""The image tower: patches, pooling, patch dropout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from towers import random_variables

from infcl_jax.models.transformer_config import TransformerConfig
from infcl_jax.models.vit import MapPool, PatchEmbedding, VisionTransformer, drop_patches, sin_cos_positions

SIZE, PATCH, WIDTH = 16, 4, 16
CONFIG = TransformerConfig(width=WIDTH, layers=1, heads=2)


def tower(**changes):
    return VisionTransformer(**({"config": CONFIG, "embed_dim": 8, "image_size": SIZE, "patch_size": PATCH} | changes))


def images(n=3, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((n, SIZE, SIZE, 3), np.float32))


@functools.cache
def variables():
    return random_variables(tower(), images())


@functools.cache
def encode(**changes):
    return jax.jit(tower(**changes).apply)


def test_patch_embedding_is_a_strided_convolution():
    module = PatchEmbedding(CONFIG, PATCH)
    image = images()
    got, params = module.init_with_output(jax.random.key(0), image)
    want = jax.lax.conv_general_dilated(
        image, params["params"]["kernel"], (PATCH, PATCH), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(got, want.reshape(3, -1, WIDTH), rtol=1e-5, atol=1e-5)


def test_features_depend_on_where_a_patch_is():
    image = images()
    shifted = jnp.roll(image, PATCH, axis=2)  # the same patches in other places
    assert not np.allclose(encode()(variables(), image), encode()(variables(), shifted), atol=1e-3)


def test_pools_differ_and_share_parameters():
    tok, avg = (encode(pool=pool)(variables(), images()) for pool in ("tok", "avg"))
    assert tok.shape == avg.shape == (3, 8)
    assert tok.dtype == avg.dtype == jnp.float32
    assert not np.allclose(tok, avg, atol=1e-3)


def test_average_pooling_leaves_the_class_token_out():
    """With zero output projections, the class embedding cannot reach the features."""
    silent = jax.tree.map(lambda p: p, variables())
    for block in silent["params"]["transformer"].values():
        block["attn"]["out_proj"]["kernel"] *= 0.0
    moved = jax.tree.map(lambda p: p, silent)
    moved["params"]["class_embedding"] = silent["params"]["class_embedding"][::-1]
    before, after = (encode(pool="avg")(v, images()) for v in (silent, moved))
    np.testing.assert_array_equal(before, after)
    before, after = (encode(pool="tok")(v, images()) for v in (silent, moved))
    assert not np.allclose(before, after, atol=1e-3)


@pytest.mark.parametrize(("rate", "kept"), [(0.5, 8), (0.3, 11), (0.99, 1)])
def test_drop_patches_keeps_distinct_patches_of_the_same_sample(rate, kept):
    tokens = jnp.arange(4 * 16, dtype=jnp.float32).reshape(4, 16, 1)
    got = np.asarray(drop_patches(jax.random.key(0), tokens, rate))[..., 0]
    assert got.shape == (4, kept)
    for sample, row in enumerate(got):
        assert len(set(row)) == kept
        assert set(row) <= set(np.asarray(tokens[sample, :, 0]))
    assert len({tuple(sorted(row % 16)) for row in got}) > 1  # samples draw their own subsets


def test_every_patch_is_kept_equally_often():
    tokens = jnp.broadcast_to(jnp.arange(16, dtype=jnp.float32)[None, :, None], (4000, 16, 1))
    counts = np.bincount(np.asarray(drop_patches(jax.random.key(0), tokens, 0.5), int).ravel(), minlength=16)
    np.testing.assert_allclose(counts / 4000, 0.5, atol=0.04)  # five standard deviations


def test_patch_dropout_is_seeded_and_only_in_training():
    module, given = tower(patch_dropout=0.5), variables()
    train = jax.jit(lambda seed: module.apply(given, images(), train=True, rngs={"dropout": jax.random.key(seed)}))
    np.testing.assert_array_equal(train(0), train(0))
    assert not np.allclose(train(0), train(1), atol=1e-4)
    np.testing.assert_array_equal(encode(patch_dropout=0.5)(variables(), images()), encode()(variables(), images()))


def test_patch_dropout_shortens_the_sequence():
    def lengths(rate):
        module = tower(patch_dropout=rate)
        call = functools.partial(module.apply, train=True, rngs={"dropout": jax.random.key(0)})
        return str(jax.make_jaxpr(call)(variables(), images())).count(f"f32[{3 * 9},{WIDTH}]")

    assert lengths(0.0) == 0
    assert lengths(0.5) > 0


def test_initial_embeddings_have_the_papers_scales():
    params = jax.jit(tower().init)(jax.random.key(0), images())["params"]
    assert np.std(params["positional_embedding"]) == pytest.approx(WIDTH**-0.5, rel=0.2)
    assert np.std(params["proj"]["kernel"]) == pytest.approx(WIDTH**-0.5, rel=0.25)
    fan_in = 3 * PATCH**2
    assert 0.9 * fan_in**-0.5 < np.abs(params["conv1"]["kernel"]).max() <= fan_in**-0.5


PARTS = {"positional_embedding", "conv1", "transformer", "ln_post"}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, PARTS | {"class_embedding", "ln_pre", "proj"}),
        ({"ln_pre": False}, PARTS | {"class_embedding", "proj"}),
        ({"pool": "avg", "class_token": False}, PARTS | {"ln_pre", "proj"}),
        ({"pos_embed": "sin_cos_2d"}, (PARTS - {"positional_embedding"}) | {"class_embedding", "ln_pre", "proj"}),
        (
            {"pool": "map", "class_token": False, "ln_pre": False, "projection": "none", "embed_dim": WIDTH},
            PARTS | {"attn_pool"},
        ),
    ],
)
def test_absent_parts_have_no_parameters(changes, parts):
    given = random_variables(tower(**changes), images())
    assert set(given["params"]) == parts
    features = encode(**changes)(given, images())
    assert features.shape == (3, changes.get("embed_dim", 8)) and features.dtype == jnp.float32
    other = encode(**changes)(given, images(seed=1))
    assert not np.isclose(features, other, rtol=1e-3, atol=1e-4).all(axis=1).any()


def test_the_final_norm_before_and_after_the_pool():
    """Of one patch, both are the same; of several, the pooled states differ."""
    for patch_size, is_same in [(SIZE, True), (PATCH, False)]:
        changes = {"pool": "avg", "class_token": False, "patch_size": patch_size}
        given = random_variables(tower(**changes), images())
        before, after = (encode(final_ln_after_pool=late, **changes)(given, images()) for late in (False, True))
        assert np.allclose(before, after, rtol=1e-4, atol=1e-5) == is_same


def test_the_bias_of_patches():
    image, bias = images(), jnp.arange(float(WIDTH))
    without, with_bias = (PatchEmbedding(CONFIG, PATCH, use_bias=flag) for flag in (False, True))
    params = without.init(jax.random.key(0), image)["params"]
    want = without.apply({"params": params}, image) + bias[None, None]
    np.testing.assert_allclose(with_bias.apply({"params": params | {"bias": bias}}, image), want, rtol=1e-6, atol=1e-6)


def test_pixels_beyond_the_last_patch_are_ignored():
    """SigLIP's 384 pixels are 27 patches of 14 and a remainder of 6."""
    module, image = tower(image_size=SIZE + 3), jnp.pad(images(), ((0, 0), (0, 3), (0, 3), (0, 0)), constant_values=9.0)
    np.testing.assert_array_equal(jax.jit(module.apply)(variables(), image), encode()(variables(), images()))


def test_fixed_positions_are_sines_and_cosines_of_column_and_row():
    width, grid, row, column = 8, 3, 2, 1
    angles = np.array([1.0, 1 / 100])
    want = [f(angles * place) for place in (column, row) for f in (np.sin, np.cos)]
    np.testing.assert_allclose(sin_cos_positions(width, grid)[row * grid + column], np.concatenate(want), rtol=1e-6)


def test_patch_dropout_without_class_token_keeps_patches():
    module = tower(patch_dropout=0.5, pool="avg", class_token=False)
    given = random_variables(module, images())
    call = functools.partial(module.apply, train=True, rngs={"dropout": jax.random.key(0)})
    assert str(jax.make_jaxpr(call)(given, images())).count(f"f32[{3 * 8},{WIDTH}]") > 0


SHAPES = (3, 5, WIDTH), (3, WIDTH)


def plain_pool(params, tokens):
    """timm's order: project, attend, project, then the residual sum with an MLP of the LayerNorm."""

    def dense(x, layer):
        return x @ layer["kernel"] + layer["bias"]

    def heads(x):
        return x.reshape(*x.shape[:-1], 2, WIDTH // 2)

    kernels, biases = (jnp.split(params["attn"]["in_proj"][name], 3, axis=-1) for name in ("kernel", "bias"))
    query = heads(params["probe"] @ kernels[0] + biases[0])
    key, value = (heads(tokens @ kernel + bias) for kernel, bias in zip(kernels[1:], biases[1:], strict=True))
    weights = jax.nn.softmax(jnp.einsum("hd,bthd->bht", query, key) / (WIDTH // 2) ** 0.5)
    x = dense(jnp.einsum("bht,bthd->bhd", weights, value).reshape(-1, WIDTH), params["attn"]["out_proj"])
    y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    hidden = dense(y * params["ln"]["scale"] + params["ln"]["bias"], params["mlp"]["c_fc"])
    return x + dense(jax.nn.gelu(hidden, approximate=False), params["mlp"]["c_proj"])


@pytest.mark.slow
def test_map_pooling_has_values_and_gradients_of_the_formula():
    tokens, weight = (jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32)) for shape in SHAPES)
    module = MapPool(dataclasses.replace(CONFIG, norm_epsilon=1e-6))
    params = random_variables(module, tokens, scale=0.3)["params"]

    def value_and_gradients(function):
        y, pull = jax.vjp(function, params, tokens)
        return y, *pull(weight)

    with jax.numpy_rank_promotion("allow"):
        want = value_and_gradients(plain_pool)
    got = value_and_gradients(lambda params, tokens: module.apply({"params": params}, tokens))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, want)
