"""The blocks that both towers share: attention, LayerNorm, remat, initialisation, configuration."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from infcl_jax.models import transformer
from infcl_jax.models.transformer import Block, SelfAttention, Transformer, TransformerConfig, attend, quick_gelu

B, T, HEADS, DIM = 2, 6, 2, 8
WIDTH = HEADS * DIM


def config(**changes):
    return TransformerConfig(**({"width": WIDTH, "layers": 2, "heads": HEADS} | changes))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def random_variables(module, *inputs):
    """Random values for every parameter, also those that start at zero or one; faster than compiling `init`."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))
    return jax.tree.map(lambda s: jnp.asarray(0.2 * rng.standard_normal(s.shape, np.float32)), shapes)


def plain_attention(query, key, value, causal):
    """One loop per sample, head and query, in float64 NumPy."""
    q, k, v = (np.asarray(a, np.float64) for a in (query, key, value))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = slice(t + 1) if causal else slice(None)
        weights = np.exp(k[b, seen, h] @ q[b, t, h] / np.sqrt(q.shape[-1]))
        out[b, t, h] = weights @ v[b, seen, h] / weights.sum()
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_attention_is_softmax_of_scaled_products(causal, dtype, tolerance):
    query, key, value = (normal(seed, B, T, HEADS, DIM).astype(dtype) for seed in range(3))
    got = jax.jit(functools.partial(attend, causal=causal, implementation="xla"))(query, key, value)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
        got.astype(jnp.float32), plain_attention(query, key, value, causal), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_attention_gradient_is_that_of_the_plain_formula(causal, dtype, tolerance):
    inputs = [normal(seed, B, T, HEADS, DIM).astype(dtype).astype(jnp.float32) for seed in range(3)]
    weight = normal(3, B, T, HEADS, DIM)

    def einsum_attention(query, key, value):
        scores = jnp.einsum("btnd,bsnd->bnts", query, key) / DIM**0.5
        mask = np.tril(np.ones((T, T), bool)) if causal else np.ones((T, T), bool)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1, where=mask[None, None]), value)

    def loss(attention, *inputs):
        return jnp.sum(weight * attention(*inputs).astype(jnp.float32))

    ours = functools.partial(attend, causal=causal, implementation="xla")
    got = jax.jit(jax.grad(functools.partial(loss, ours), (0, 1, 2)))(*(x.astype(dtype) for x in inputs))
    want = jax.jit(jax.grad(functools.partial(loss, einsum_attention), (0, 1, 2)))(*inputs)
    for ours, plain in zip(got, want, strict=True):
        assert ours.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(ours.astype(jnp.float32), plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [T, T + 1])
def test_cudnn_goes_to_the_fused_kernel_with_the_same_meaning(monkeypatch, causal, length):
    """The kernel itself needs a GPU; JAX's XLA attention, which follows the same contract, stands in for it."""
    seen = []

    def stand_in(query, key, value, *, implementation, **options):
        seen.append((implementation, query.shape[1] % 2))
        with jax.numpy_dtype_promotion("standard"):
            return original(query, key, value, implementation="xla", **options)

    def value_and_gradients(implementation):
        def loss(*inputs):
            return jnp.sum(weight * attend(*inputs, causal=causal, implementation=implementation).astype(jnp.float32))

        return jax.tree.leaves(jax.value_and_grad(loss, (0, 1, 2))(*inputs))

    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    inputs = [normal(seed, B, length, HEADS, DIM).astype(jnp.bfloat16) for seed in range(3)]
    weight = normal(3, B, length, HEADS, DIM)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        fused = value_and_gradients("cudnn")
    assert seen == [("cudnn", 0)]
    for theirs, ours in zip(fused, value_and_gradients("xla"), strict=True):
        np.testing.assert_allclose(theirs.astype(jnp.float32), ours.astype(jnp.float32), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "channels", "best"),
    [
        ("cpu", None, "bfloat16", 64, "xla"),
        ("gpu", "9.0", "bfloat16", 64, "cudnn"),
        ("gpu", "12.0", "float16", 128, "cudnn"),
        ("gpu", "7.5", "float16", 64, "xla"),
        ("gpu", "gfx942", "bfloat16", 64, "xla"),
        ("gpu", "9.0", "float32", 64, "xla"),
        ("gpu", "9.0", "bfloat16", 136, "xla"),
        ("gpu", "9.0", "bfloat16", 20, "xla"),
    ],
)
def test_the_best_attention_is_what_device_and_inputs_allow(monkeypatch, backend, capability, dtype, channels, best):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    assert transformer.best_attention(dtype, channels) == best


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [50, 77, 197, 257])
def test_cudnn_takes_every_sequence_length_of_the_models(monkeypatch, causal, length):
    """Without a GPU: the program for one is built, forward and backward."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    attention = functools.partial(attend, causal=causal, implementation="cudnn")
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(attention(*x).astype(jnp.float32)), (0, 1, 2)))
    inputs = [jax.ShapeDtypeStruct((B, length, HEADS, 64), jnp.bfloat16)] * 3
    program = gradient.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in program and "__cudnn$fmhaSoftmaxBackward(" in program


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="cuDNN needs an NVIDIA GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [50, 77, 197, 257])
def test_cudnn_agrees_with_xla_on_a_gpu(causal, length):
    inputs = [normal(seed, B, length, HEADS, 64).astype(jnp.bfloat16) for seed in range(3)]

    def value_and_gradients(implementation):
        attention = functools.partial(attend, causal=causal, implementation=implementation)
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(attention(*x).astype(jnp.float32) ** 2), (0, 1, 2)))(
            *inputs
        )

    for fused, ours in zip(*map(jax.tree.leaves, map(value_and_gradients, ("cudnn", "xla"))), strict=True):
        np.testing.assert_allclose(fused.astype(jnp.float32), ours.astype(jnp.float32), rtol=5e-2, atol=5e-2)


def test_block_is_two_pre_norm_residual_sums():
    c, x = config(activation="quick_gelu"), normal(0, B, T, WIDTH)
    variables = random_variables(Block(c), x, False)
    p = jax.tree.map(np.asarray, variables["params"])

    def norm(y, of):
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
        return y * of["scale"][None, None] + of["bias"][None, None]

    def dense(y, of):
        return y @ of["kernel"] + of["bias"][None, None]

    x1 = np.asarray(x)
    qkv = dense(norm(x1, p["ln_1"]), p["attn"]["in_proj"])
    query, key, value = (part.reshape(B, T, HEADS, DIM) for part in np.split(qkv, 3, axis=-1))
    x2 = x1 + dense(plain_attention(query, key, value, causal=False).reshape(x.shape), p["attn"]["out_proj"])
    hidden = dense(norm(x2, p["ln_2"]), p["mlp"]["c_fc"])
    want = x2 + dense(hidden / (1 + np.exp(-1.702 * hidden)), p["mlp"]["c_proj"])
    got = jax.jit(Block(c).apply, static_argnums=2)(variables, x, False)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_layer_norm_of_bfloat16_keeps_float32_statistics():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return transformer.layer_norm(config(dtype="bfloat16"), x, "norm")

    x = (100 + normal(0, B, T, WIDTH)).astype(jnp.bfloat16)  # bfloat16 sums of such values lose the deviations
    got, _ = Norm().init_with_output(jax.random.key(0), x)
    wide = np.asarray(x, np.float64)
    want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2)


def _gradient(remat, dropout=0.0):
    model, x = Transformer(config(remat=remat, dropout=dropout)), normal(0, B, T, WIDTH)
    variables = random_variables(model, x)

    def loss(variables):
        y = model.apply(variables, x, train=True, rngs={"dropout": jax.random.key(2)})
        return jnp.sum(y**2)

    return jax.grad(loss), variables


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_keeps_the_gradient(remat):
    """With dropout, so that the recomputation has to draw the same numbers again."""
    stored, variables = _gradient(None, dropout=0.5)
    recomputed, same = _gradient(remat, dropout=0.5)
    assert jax.tree.structure(variables) == jax.tree.structure(same)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4),
        jax.jit(stored)(variables),
        jax.jit(recomputed)(variables),
    )


def test_remat_recomputes_what_its_policy_says():
    def products(remat):
        gradient, variables = _gradient(remat)
        return str(jax.make_jaxpr(gradient)(variables)).count("dot_general")

    none, dots, full = map(products, (None, "dots", "full"))
    assert none < dots < full


def test_dropout_is_seeded_and_only_in_training():
    model, x = Transformer(config(dropout=0.5)), normal(0, B, T, WIDTH)
    variables = random_variables(model, x)
    apply = jax.jit(lambda seed: model.apply(variables, x, train=True, rngs={"dropout": jax.random.key(seed)}))
    np.testing.assert_array_equal(apply(0), apply(0))
    assert not np.allclose(apply(0), apply(1))
    plain = jax.jit(functools.partial(Transformer(config()).apply, train=True))(variables, x)
    np.testing.assert_allclose(jax.jit(model.apply)(variables, x), plain, rtol=1e-6, atol=1e-6)


def test_initial_weights_have_the_papers_scales():
    c = config(width=256, heads=4, layers=2)
    init = jax.jit(Block(c).init, static_argnums=2)
    params = jax.tree.map(np.asarray, init(jax.random.key(0), jnp.zeros((1, 2, 256)), False)["params"])
    stds = {
        "in_proj": (params["attn"]["in_proj"], 256**-0.5),
        "out_proj": (params["attn"]["out_proj"], 256**-0.5 * 4**-0.5),
        "c_fc": (params["mlp"]["c_fc"], 512**-0.5),
        "c_proj": (params["mlp"]["c_proj"], 256**-0.5 * 4**-0.5),
    }
    for name, (dense, std) in stds.items():
        assert np.std(dense["kernel"]) == pytest.approx(std, rel=0.02), name
        assert not dense["bias"].any(), name


def test_attention_parameters_split_by_query_key_value():
    """Zero value columns of `in_proj` leave the bias of `out_proj` alone, whatever queries and keys are."""
    module, x = SelfAttention(config()), normal(0, B, T, WIDTH)
    variables = random_variables(module, x)
    kernel = variables["params"]["in_proj"]["kernel"].at[:, 2 * WIDTH :].set(0.0)
    variables["params"]["in_proj"] = {"kernel": kernel, "bias": jnp.zeros(3 * WIDTH)}
    want = np.broadcast_to(variables["params"]["out_proj"]["bias"], x.shape)
    np.testing.assert_array_equal(jax.jit(module.apply)(variables, x), want)


def test_quick_gelu_is_close_to_gelu():
    x = jnp.linspace(-5, 5, 101)
    np.testing.assert_allclose(quick_gelu(x), jax.nn.gelu(x, approximate=False), atol=0.021)
    assert not np.allclose(quick_gelu(x), jax.nn.gelu(x, approximate=False), atol=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads must divide width; got heads 3, width 16"),
        ({"layers": 0}, "layers must be a positive integer; got 0"),
        ({"width": 16.0}, "width must be a positive integer; got 16.0"),
        ({"mlp_ratio": 0.01}, "mlp_ratio"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\); got 1.0"),
        ({"activation": "relu"}, "activation must be one of 'gelu', 'quick_gelu'; got 'relu'"),
        ({"remat": "dot"}, "remat must be one of None, 'full', 'dots'; got 'dot'"),
        ({"attention": "flash"}, "attention must be one of None, 'xla', 'cudnn'; got 'flash'"),
        ({"attention": "cudnn"}, "attention 'cudnn' needs dtype"),
        ({"attention": "cudnn", "dtype": "bfloat16", "heads": 4}, "got 'bfloat16' and 4"),
        ({"attention": "cudnn", "dtype": "float16", "width": 272}, "at most 128; got 'float16' and 136"),
        ({"dtype": "int32"}, "dtype must be one of 'float32', 'bfloat16', 'float16'; got 'int32'"),
        ({"param_dtype": "bf16"}, "param_dtype must be one of .* got 'bf16'"),
    ],
)
def test_bad_config(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype("bfloat16"), "bfloat16"])
def test_dtype_is_stored_by_name(dtype):
    assert config(dtype=dtype) == config(dtype="bfloat16")
