"""The blocks that both towers share: attention, LayerNorm, remat, initialization, configuration."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from towers import random_variables

from infcl_jax.models import RESIDUAL, transformer
from infcl_jax.models.transformer import Transformer, TransformerBlock, TransformerConfig

B, T, HEADS, DIM = 2, 6, 2, 8
WIDTH = HEADS * DIM


def config(**changes):
    return TransformerConfig(**({"width": WIDTH, "layers": 2, "heads": HEADS} | changes))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def plain_transformer(params, x, causal):
    """The formulas, with quick_gelu and layer scale."""

    def norm(y, of):
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
        return y * of["scale"] + of["bias"]

    def dense(y, of):
        return y @ of["kernel"] + of["bias"]

    for p in params.values():
        qkv = jnp.split(dense(norm(x, p["ln_1"]), p["attn"]["in_proj"]), 3, axis=-1)
        query, key, value = (part.reshape(B, T, HEADS, DIM) for part in qkv)
        scores = jnp.einsum("bthd,bshd->bhts", query, key) / DIM**0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf) if causal else scores)
        y = dense(jnp.einsum("bhts,bshd->bthd", weights, value).reshape(x.shape), p["attn"]["out_proj"])
        x = x + y * p.get("ls_1", 1.0)
        hidden = dense(norm(x, p["ln_2"]), p["mlp"]["c_fc"])
        x = x + dense(hidden * jax.nn.sigmoid(1.702 * hidden), p["mlp"]["c_proj"]) * p.get("ls_2", 1.0)
    return x


@pytest.mark.parametrize(
    ("causal", "position", "remat", "packed", "layer_scale"),
    [
        (False, None, None, False, None),
        (True, None, None, True, 0.1),
        (False, (0, 0), None, True, None),
        (True, (T - 1, 2), None, False, None),
        (True, (T - 1, 2), "full", True, 0.1),
        (False, (0, 0), "dots", False, None),
    ],
)
def test_blocks_are_two_pre_norm_residual_sums(monkeypatch, causal, position, remat, packed, layer_scale):
    """Values and gradients of all tokens or one, with one or three QKV GEMMs."""
    monkeypatch.setattr(transformer, "prefers_packed", lambda *_: packed)
    model = Transformer(config(activation="quick_gelu", causal=causal, remat=remat, layer_scale=layer_scale))
    x, weight = normal(0, B, T, WIDTH), normal(1, B, T, WIDTH)
    position = None if position is None else jnp.asarray(position)
    params = random_variables(model, x)["params"]

    def asked(y):
        return y if position is None else y[jnp.arange(B), position]

    def value_and_gradients(run):
        y, pull = jax.vjp(run, params, x)
        return y, *pull(asked(weight))

    with jax.numpy_rank_promotion("allow"):
        want = jax.jit(lambda: value_and_gradients(lambda p, x: asked(plain_transformer(p, x, causal))))()
    outputs = jax.jit(lambda: value_and_gradients(lambda p, x: model.apply({"params": p}, x, position)))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), outputs, want)


def test_the_gradient_of_a_bias_goes_through_its_dropout():
    """The result is linear in the last bias, so a difference is exact."""
    model, x, weight = Transformer(config(dropout=0.5)), normal(0, B, T, WIDTH), normal(1, B, T, WIDTH)
    variables, way = random_variables(model, x), normal(2, WIDTH)

    @jax.jit
    def loss(bias):
        params = variables["params"] | {"block_01": variables["params"]["block_01"] | {"mlp": mlp | {"c_proj": bias}}}
        return jnp.sum(weight * model.apply({"params": params}, x, train=True, rngs={"dropout": jax.random.key(2)}))

    mlp = variables["params"]["block_01"]["mlp"]
    at, ahead = mlp["c_proj"], mlp["c_proj"] | {"bias": mlp["c_proj"]["bias"] + way}
    slope = jnp.vdot(jax.jit(jax.grad(loss))(at)["bias"], way)
    np.testing.assert_allclose(slope, loss(ahead) - loss(at), rtol=1e-4)
    assert abs(slope - jnp.vdot(weight.sum((0, 1)), way)) > 1  # without dropout


def test_layer_norm_of_bfloat16_keeps_float32_statistics():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return transformer.LayerNorm(config(dtype="bfloat16"), name="norm")(x)

    x = (100 + normal(0, B, T, WIDTH)).astype(jnp.bfloat16)  # bfloat16 sums of such values lose the deviations
    got, _ = Norm().init_with_output(jax.random.key(0), x)
    wide = np.asarray(x, np.float64)
    want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2)


def _gradient(remat, dropout=0.0, kept=None):
    """With `kept`, the model is recomputed from the values of those names."""
    model, x = Transformer(config(remat=remat, dropout=dropout)), normal(0, B, T, WIDTH)
    variables = random_variables(model, x)

    def loss(variables):
        y = model.apply(variables, x, train=True, rngs={"dropout": jax.random.key(2)})
        return jnp.sum(y**2)

    if kept is not None:
        loss = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(*kept))

    return jax.grad(loss), variables


def test_remat_keeps_the_gradient():
    """With dropout, so that the recomputation has to draw the same numbers again."""
    stored, variables = _gradient(None, dropout=0.5)
    recomputed, _ = _gradient("full", dropout=0.5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4),
        jax.jit(stored)(variables),
        jax.jit(recomputed)(variables),
    )


def _products(remat, kept=None):
    gradient, variables = _gradient(remat, kept=kept)
    return str(jax.make_jaxpr(gradient)(variables)).count("dot_general")


def test_remat_recomputes_what_its_policy_says():
    none, dots, full = map(_products, (None, "dots", "full"))
    assert none < dots < full


def test_from_its_residual_stream_a_model_is_recomputed_with_fewer_products():
    """The two GEMMs per layer that produce the residual stream are not recomputed.

    With remat in each layer, nothing is computed three times.
    """
    assert _products(None, ()) - _products(None, (RESIDUAL,)) == 2 * config().layers
    assert _products("full", (RESIDUAL,)) <= _products("full") < _products("full", ())


def test_dropout_is_seeded_and_only_in_training():
    model, x = Transformer(config(dropout=0.5)), normal(0, B, T, WIDTH)
    variables = random_variables(model, x)
    apply = jax.jit(lambda seed: model.apply(variables, x, train=True, rngs={"dropout": jax.random.key(seed)}))
    np.testing.assert_array_equal(apply(0), apply(0))
    assert not np.allclose(apply(0), apply(1))
    plain = jax.jit(functools.partial(Transformer(config()).apply, train=True))(variables, x)
    np.testing.assert_allclose(jax.jit(model.apply)(variables, x), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padding", [0, 2])
def test_dropout_of_one_token_is_that_of_all(monkeypatch, padding):
    """With or without padding for an attention kernel, to which no token of a causal model attends."""
    model, x, position = Transformer(config(dropout=0.5, causal=True)), normal(0, B, T, WIDTH), jnp.array([T - 1, 2])
    variables, rngs = random_variables(model, x), {"dropout": jax.random.key(0)}
    want = jax.jit(lambda: model.apply(variables, x, train=True, rngs=rngs))()[jnp.arange(B), position]
    attend = transformer.attend
    monkeypatch.setattr(transformer, "padding_for", lambda *_: padding)
    monkeypatch.setattr(transformer, "attend", lambda *qkv, padding, **options: attend(*qkv, **options))
    got = jax.jit(lambda: model.apply(variables, x, position, train=True, rngs=rngs))()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_initial_weights_have_the_papers_scales():
    c = config(width=256, heads=4, layers=2)
    init = jax.jit(TransformerBlock(c, 2).init, static_argnums=4)
    params = jax.tree.map(np.asarray, init(jax.random.key(0), jnp.zeros((2, 256)), None, None, False)["params"])
    stds = {
        "in_proj": (params["attn"]["in_proj"], 256**-0.5),
        "out_proj": (params["attn"]["out_proj"], 256**-0.5 * 4**-0.5),
        "c_fc": (params["mlp"]["c_fc"], 512**-0.5),
        "c_proj": (params["mlp"]["c_proj"], 256**-0.5 * 4**-0.5),
    }
    for name, (dense, std) in stds.items():
        assert np.std(dense["kernel"]) == pytest.approx(std, rel=0.02), name
        assert not dense["bias"].any(), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "expected width to be a multiple of heads, got width 16 and heads 3"),
        ({"layers": 0}, "expected layers to be a positive integer, got 0"),
        ({"width": 16.0}, "expected width to be a positive integer, got 16.0"),
        ({"mlp_ratio": 0.01}, "mlp_ratio"),
        ({"norm_epsilon": 0.0}, "expected norm_epsilon to be positive, got 0.0"),
        ({"dropout": 1.0}, r"expected dropout to be a number in \[0, 1\), got 1.0"),
        ({"activation": "relu"}, r"expected activation to be one of \('gelu', 'gelu_tanh', 'quick_gelu'\), got 'relu'"),
        ({"remat": "dot"}, r"expected remat to be one of \(None, 'full', 'dots'\), got 'dot'"),
        ({"attention": "flash"}, r"attention to be one of \(None, 'xla', 'cudnn', 'mosaic_gpu'\), got 'flash'"),
        ({"attention": "cudnn"}, "expected dtype 'bfloat16' or 'float16' .* for attention 'cudnn'"),
        ({"attention": "cudnn", "dtype": "bfloat16", "heads": 4}, "got 'bfloat16' and 4"),
        ({"attention": "cudnn", "dtype": "float16", "width": 272}, "at most 128, .* got 'float16' and 136"),
        ({"attention": "mosaic_gpu", "dtype": "bfloat16"}, "64 channels per head .* got 'bfloat16' and 8"),
        ({"attention": "mosaic_gpu", "width": 128, "heads": 2}, "got 'float32' and 64"),
        ({"dtype": "int32"}, r"dtype to be one of \('float32', 'bfloat16', 'float16'\), got 'int32'"),
        ({"param_dtype": "bf16"}, "expected param_dtype to be one of .* got 'bf16'"),
    ],
)
def test_bad_config(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype("bfloat16"), "bfloat16"])
def test_dtype_is_stored_by_name(dtype):
    assert config(dtype=dtype) == config(dtype="bfloat16")
