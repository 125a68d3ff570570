"""Attention: the plain formula and its gradient, and when it goes to cuDNN."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import private_jax
import pytest

from infcl_jax.ops.attention import api
from infcl_jax.ops.attention.api import attend, attend_from, best_attention, padding_for
from infcl_jax.ops.common.gpu import log_fallback

B, T, HEADS, DIM = 2, 6, 2, 8


def attend_padded(*inputs, implementation, causal):
    """As the transformer calls it."""
    padding = padding_for(inputs[0].shape, inputs[0].dtype, implementation)
    inputs = (jnp.pad(a, ((0, 0), (0, padding), (0, 0), (0, 0))) for a in inputs)
    y = attend(*inputs, causal=causal, padding=padding, implementation=implementation)
    return y[:, : y.shape[1] - padding]


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_attention_is_softmax_of_scaled_products(causal, dtype, tolerance):
    qkv = [normal(seed, B, T, HEADS, DIM).astype(dtype) for seed in range(3)]
    run = jax.jit(functools.partial(attend, causal=causal, implementation="xla"))
    for got in (run(*qkv), run(jnp.concatenate(qkv, axis=2))):
        assert got.dtype == jnp.dtype(dtype)
        want = oracle.attention(*qkv, causal)
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=tolerance, atol=tolerance)


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
def test_masked_keys_are_absent(caplog, monkeypatch, causal):
    """It runs in XLA; where kernels would be faster, one line says so."""
    qkv = [normal(seed, B, T, HEADS, DIM) for seed in range(3)]
    mask = jnp.asarray([[True] * (T - 2) + [False] * 2] * B)
    want = oracle.attention(*(a[:, : T - 2] for a in qkv), causal)
    monkeypatch.setattr(api, "best_attention", lambda *_: "cudnn")
    log_fallback.cache_clear()
    with caplog.at_level("INFO", log_fallback.__module__):
        for _ in range(2):
            outputs = attend(*qkv, causal=causal, key_mask=mask)
    np.testing.assert_allclose(outputs[:, : T - 2], want, rtol=1e-5, atol=1e-5)
    (record,) = caplog.records
    assert "attention of sequences with a mask of keys runs without" in record.getMessage()


def test_kernels_by_name_refuse_a_mask_of_keys():
    x = normal(0, B, T, HEADS, DIM)
    with pytest.raises(ValueError, match="expected attention 'xla' or None with a mask of keys, got 'cudnn'"):
        attend(x, x, x, causal=False, key_mask=jnp.ones((B, T), bool), implementation="cudnn")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
def test_attention_from_one_position_is_that_row(causal, padding):
    position, own = jnp.asarray([T - 2, 1]), jnp.arange(B)
    query, x = normal(0, B, T, HEADS, DIM), normal(1, B, T, HEADS * DIM)
    kernels = [normal(seed, HEADS * DIM, HEADS * DIM) / (HEADS * DIM) ** 0.5 for seed in (2, 3)]
    key, value = ((x @ kernel).reshape(B, T, HEADS, DIM) for kernel in kernels)
    want = oracle.attention(*(a[:, : T - padding] for a in (query, key, value)), causal)[own, position]
    outputs = attend_from(query[own, position], x, *kernels, position, causal=causal, padding=padding)
    np.testing.assert_allclose(outputs, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [T, T + 1])
def test_cudnn_goes_to_the_fused_kernel_with_the_same_meaning(monkeypatch, causal, length):
    """JAX's XLA attention, which has the same contract, replaces the GPU kernel."""
    seen = []

    def stand_in(query, key, value, *, implementation, **options):
        seen.append((implementation, query.shape[1] % 2))
        with jax.numpy_dtype_promotion("standard"):
            return original(query, key, value, implementation="xla", **options)

    def value_and_gradients(implementation):
        def loss(*inputs):
            return jnp.sum(
                weight * attend_padded(*inputs, causal=causal, implementation=implementation).astype(jnp.float32)
            )

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
    device = types.SimpleNamespace(platform=backend, compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert best_attention((B, 400, HEADS, channels), dtype) == best


@pytest.mark.parametrize(
    ("length", "channels", "causal"),
    [(50, 64, False), (77, 64, True), (729, 72, False), (730, 80, True), (257, 104, False), (1024, 96, True)],
)
def test_cudnn_takes_every_sequence_length_of_the_models(monkeypatch, length, channels, causal):
    """Without a GPU: the program for one is built, forward and backward."""
    private_jax.pretend_cudnn(monkeypatch)
    attention = functools.partial(attend_padded, causal=causal, implementation="cudnn")
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(attention(*x).astype(jnp.float32)), (0, 1, 2)))
    inputs = [jax.ShapeDtypeStruct((B, length, HEADS, channels), jnp.bfloat16)] * 3
    program = gradient.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in program and "__cudnn$fmhaSoftmaxBackward(" in program


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="cuDNN needs an NVIDIA GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [50, 77, 197, 257])
def test_cudnn_agrees_with_xla_on_a_gpu(causal, length):
    inputs = [normal(seed, B, length, HEADS, 64).astype(jnp.bfloat16) for seed in range(3)]

    def value_and_gradients(implementation):
        attention = functools.partial(attend_padded, causal=causal, implementation=implementation)
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(attention(*x).astype(jnp.float32) ** 2), (0, 1, 2)))(
            *inputs
        )

    for fused, ours in zip(*map(jax.tree.leaves, map(value_and_gradients, ("cudnn", "xla"))), strict=True):
        np.testing.assert_allclose(fused.astype(jnp.float32), ours.astype(jnp.float32), rtol=5e-2, atol=5e-2)
