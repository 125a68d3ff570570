"""Attention's Hopper kernels in the CPU interpreter and lowered for CUDA.

One test needs a Hopper GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import private_jax
import pytest
import runs
from gpus import ALONE, count_kernels, described, interpreted, lowered, under
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.benchmarks.attention import exact_attention
from infcl_jax.models.transformer import Transformer, TransformerConfig
from infcl_jax.ops.attention import api, pallas_mosaic_gpu
from infcl_jax.ops.attention.api import attend, best_attention
from infcl_jax.ops.pairwise.lse import available_implementations

BF16, FP16 = jnp.dtype("bfloat16"), jnp.dtype("float16")
NAMES = ("result", "query", "key", "value")


@pytest.fixture
def complete_interpreter(monkeypatch):
    """JAX's interpreter with accumulator stores and left operands in registers."""
    private_jax.complete_gpu_interpreter(monkeypatch)


def given(b, positions, heads, dtype, scale=2.0):
    """Queries, keys, values, and the result's cotangents."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(s * rng.standard_normal((b, positions, heads, 64)), dtype) for s in (scale, 1.0, 1.0, 1.0)]


def spans_of(b, lengths):
    """Spans of sequences of these lengths side by side, the same in every row."""
    stop = np.cumsum(lengths)
    spans = np.repeat(stop - lengths, lengths), np.repeat(stop, lengths)
    return tuple(jnp.broadcast_to(jnp.asarray(a, jnp.int32), (b, len(a))) for a in spans)


def exact_in_spans(arrays, lengths, causal):
    """Attention and gradients of each sequence by itself, in float64."""
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    exact = [exact_attention(*(a[:, part] for a in arrays), causal=causal) for part in parts]
    return [np.concatenate(values, axis=1) for values in zip(*exact, strict=True)]


@functools.partial(jax.jit, static_argnames=("causal", "implementation"))
def value_and_gradients(query, key, value, cotangent, spans=None, *, causal, implementation="mosaic_gpu"):
    run = functools.partial(attend, causal=causal, spans=spans, implementation=implementation)
    result, pull = jax.vjp(run, query, key, value)
    return result, *pull(cotangent)


def assert_close(outputs, want, dtype, least=1e-9):
    bound = 1e-2 if dtype == BF16 else 1.5e-3
    for name, got, exact in zip(NAMES, outputs, want, strict=True):
        assert got.dtype == dtype, name
        atol = bound * np.abs(exact).max() + least
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=0, atol=atol, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("b", "positions", "heads", "dtype", "causal"),
    [
        (2, 56, 3, BF16, False),  # of one tile: each warpgroup has heads of its own
        (1, 64, 3, FP16, True),
        pytest.param(2, 72, 3, BF16, True, marks=pytest.mark.full),
        pytest.param(1, 136, 3, BF16, False, marks=pytest.mark.full),  # of three: a warpgroup has two
        (1, 264, 3, FP16, False),  # no room for the next head
        # Every buffer is refilled, by every warpgroup that loads.
        pytest.param(4, 56, 8, BF16, False, marks=pytest.mark.full),
        *(pytest.param(2, t, 8, BF16, t == 72, marks=pytest.mark.full) for t in (72, 136, 200, 264)),
    ],
)
@pytest.mark.usefixtures("complete_interpreter")
def test_kernels_match_float64(capsys, b, positions, heads, dtype, causal):
    arrays = given(b, positions, heads, dtype)
    with interpreted(capsys):
        outputs = jax.device_get(value_and_gradients(*arrays, causal=causal))
    assert_close(outputs, exact_attention(*arrays, causal=causal), dtype)


SPANS = {
    "many": (3, 20, 41, 1, 1, 30, 32),
    "one": (128,),
    "of tiles": (64, 64),
    "across three": (50, 100, 42),
    "ragged": (7, 60, 37),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "causal"),
    [
        ("many", True),
        ("many", False),
        ("across three", True),
        ("ragged", False),
        *(pytest.param(name, causal, marks=pytest.mark.full) for name in SPANS for causal in (True, False)),
    ],
)
@pytest.mark.usefixtures("complete_interpreter")
def test_spans_separate_sequences(capsys, lengths, causal):
    lengths = SPANS[lengths]
    arrays = given(1, sum(lengths), 2, BF16)
    with interpreted(capsys):
        outputs = jax.device_get(value_and_gradients(*arrays, spans_of(1, lengths), causal=causal))
    assert_close(outputs, exact_in_spans(arrays, lengths, causal), BF16)


@pytest.mark.parametrize(
    ("shape", "causal"), [((4096, 77, 8, 64), True), ((3, 320, 5, 64), True), ((1, 1, 1, 64), False)]
)
def test_attention_lowers_to_two_kernels(shape, causal):
    x = jax.ShapeDtypeStruct(shape, BF16)
    run = jax.jit(functools.partial(value_and_gradients, causal=causal, implementation=None))
    with jax.sharding.use_abstract_mesh(ALONE):
        assert count_kernels(lowered(run, x, x, x, x)) == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "mesh", "best"),
    [
        ((64, 257, 16, 64), BF16, ALONE, "mosaic_gpu"),
        ((64, 320, 16, 64), FP16, described(data=8), "mosaic_gpu"),
        ((63, 257, 16, 64), BF16, described(data=8), "xla"),
        ((64, 257, 16, 64), BF16, described(data=8).update(axis_types=(AxisType.Manual,)), "mosaic_gpu"),
        ((64, 257, 16, 64), BF16, described(data=8).update(axis_types=(AxisType.Explicit,)), "xla"),
        ((64, 321, 16, 64), BF16, ALONE, "xla"),
        ((64, 257, 16, 80), BF16, ALONE, "xla"),
        ((64, 257, 16, 64), "float32", ALONE, "xla"),
        ((64, 257, 16, 64), BF16, None, "xla"),  # a CPU
    ],
)
def test_best_attention(shape, dtype, mesh, best):
    with under(mesh):
        assert best_attention(shape, dtype) == best


@pytest.mark.parametrize(
    ("mesh", "shape", "dtype", "message"),
    [
        (None, (2, 50, 2, 64), BF16, "expected a Hopper GPU .* got cpu"),
        (ALONE, (2, 321, 2, 64), BF16, "at most 320 positions and heads of 64 channels .* got bfloat16, 321 and 64"),
        (ALONE, (2, 50, 2, 32), FP16, "got float16, 50 and 32"),
        (ALONE, (2, 50, 2, 64), "float32", "expected bf16 or fp16"),
    ],
)
def test_what_the_kernels_do_not_take_is_said(mesh, shape, dtype, message):
    x = jax.ShapeDtypeStruct(shape, dtype)
    run = functools.partial(attend, causal=False, implementation="mosaic_gpu")
    with under(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(run, x, x, x)


def test_a_sharded_batch_has_kernels_for_its_own_sequences():
    """Trace the backward pass outside the mesh, as a training step does; no padding."""
    config = TransformerConfig(width=192, layers=1, heads=3, dtype="bfloat16")
    model, mesh = Transformer(config), described(data=8)
    x = jax.ShapeDtypeStruct((64, 77, 192), BF16)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype)))

    def gradients(variables, x):
        with jax.sharding.use_abstract_mesh(mesh):
            y, pull = jax.vjp(model.apply, variables, x)
        return pull(y)

    text = lowered(jax.jit(gradients), variables, x)
    assert count_kernels(text) == 2  # the rows are too few for those of the activation and of the norms
    assert "tensor<8x77x9x64xbf16>" in text


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_devices_attend_to_their_own_sequences(monkeypatch, causal):
    """The kernels' own arithmetic is replaced by XLA's: the interpreter has one device."""

    def forward(packed, *, causal, sm_count):
        assert packed.shape == (2, 20, 9, 64)
        return attend(packed, causal=causal, implementation="xla"), jnp.zeros((6, 64))

    def backward(packed, result, lse, cotangent, *, causal, sm_count):
        assert lse.shape == (6, 64)
        plain = functools.partial(attend, causal=causal, implementation="xla")
        return jax.vjp(plain, packed)[1](cotangent)

    monkeypatch.setattr(pallas_mosaic_gpu, "forward", forward)
    monkeypatch.setattr(pallas_mosaic_gpu, "backward", backward)
    monkeypatch.setattr(api.gpu, "multiprocessors", lambda: 132)
    monkeypatch.setattr(api.gpu, "compute_capability", lambda: "9.0")
    arrays, mesh = given(8, 20, 3, BF16), oracle.mesh_of(4)
    sharded = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in arrays]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        outputs = value_and_gradients(*sharded, causal=causal)
    assert_close(outputs, exact_attention(*arrays, causal=causal), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [*SPANS.values(), (77, 77, 77, 25)], ids=str)
def test_spans_on_the_gpu_separate_sequences_and_repeat(lengths, causal):
    if "mosaic_gpu" not in available_implementations():
        pytest.skip("no kernels for this device")
    arrays, spans = given(40, sum(lengths), 8, BF16), spans_of(40, lengths)
    outputs = jax.device_get(value_and_gradients(*arrays, spans, causal=causal))
    assert_close(outputs, exact_in_spans(arrays, lengths, causal), BF16)
    assert runs.equal_bits(outputs, jax.device_get(value_and_gradients(*arrays, spans, causal=causal)))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("b", "positions", "heads", "dtype", "scale"),
    [
        (200, 50, 12, BF16, 2.0),
        (100, 77, 8, BF16, 2.0),
        (50, 197, 12, BF16, 30.0),
        (40, 257, 16, BF16, 2.0),
        (3, 1, 7, BF16, 2.0),
        (5, 65, 7, FP16, 2.0),
        (5, 129, 7, FP16, 2.0),
        (5, 320, 7, BF16, 100.0),
    ],
)
def test_kernels_on_the_gpu_match_float64_and_repeat(b, positions, heads, dtype, scale, causal):
    if "mosaic_gpu" not in available_implementations():
        pytest.skip("no kernels for this device")
    arrays = given(b, positions, heads, dtype, scale)
    outputs = jax.device_get(value_and_gradients(*arrays, causal=causal))
    # With one position queries and keys have no gradients: sums in float32 that cancel.
    least = 1e-5 if positions == 1 else 1e-9
    assert_close(outputs, exact_attention(*arrays, causal=causal), dtype, least)
    for _ in range(3):
        assert runs.equal_bits(outputs, jax.device_get(value_and_gradients(*arrays, causal=causal)))
