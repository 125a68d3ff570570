"""All options of `pairwise_lse`, on all implementations, against a dense fp64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from infcl_jax import pairwise_lse
from infcl_jax.ops.pairwise.lse import available_implementations, dense, xla
from infcl_jax.ops.pairwise.lse.block import LseBlock, LseGradient

DEVICES, BX, BY, DIM = 4, 5, 7, 19  # rows and columns of a device
# An orthogonal array, with every pair of values. properties.check_primitive has masks, labels and per-sample scales.
OPTIONS = [
    {
        "positives": "exclude" if excluded else "include",
        "scales": scales,
        "masked": excluded != (number in (1, 2)),
        "labeled": excluded != (number in (2, 3)),
    }
    for number, scales in enumerate(("shared", "two", "per_sample", "rows_only"))
    for excluded in (False, True)
]

CHOSEN = {"xla": range(8), "ring": (1, 2, 4, 7)}  # of the others, two with all values but two kinds of scales


def weighted_sum(result, weights):
    """Returns a scalar with a different cotangent for every output."""
    terms = [(a * w).sum() for a, w in zip(result, weights, strict=True) if a is not None]
    return sum(terms[1:], terms[0])


def case(positives, scales, masked, labeled):
    rng = np.random.default_rng(3)
    bx, by = BX * DEVICES, BY * DEVICES
    x, y = oracle.features("random", bx, by, DIM, np.float64)
    local = rng.integers(0, BY, bx) if labeled else np.tile(np.arange(BX), DEVICES)
    x_mask = y_mask = None
    if masked:
        x_mask, y_mask = rng.random(bx) < 0.7, rng.random(by) < 0.7
    per_row, per_column = rng.uniform(5, 30, bx), rng.uniform(5, 30, by)
    scales = {
        "shared": (np.float64(14.3), None),
        "two": (np.float64(14.3), np.float64(7.0)),
        "per_sample": (per_row, per_column),
        "rows_only": (per_row, None),
    }[scales]
    weights = [rng.normal(size=n) for n in (bx, by, bx)]
    return (x, y, *scales), local.astype(np.int32), (x_mask, y_mask), weights


@functools.cache  # the same for every implementation
def expected(positives, scales, masked, labeled):
    """Computes value and gradients of the whole batch with `dense_lse`."""
    args, local, masks, weights = case(positives, scales, masked, labeled)
    labels = jnp.asarray(local + np.repeat(np.arange(DEVICES), BX) * BY, jnp.int32)
    columns = scales != "rows_only"
    x_mask, y_mask = (None if m is None else jnp.asarray(m) for m in masks)

    def value(x, y, x_scale, y_scale):
        y_scale = None if y_scale is None else jnp.broadcast_to(y_scale, y.shape[:1])
        block = LseBlock(x, y, x_scale, y_scale, x_mask, y_mask, labels)
        row, col, positive = dense.dense_lse(block, exclude=positives == "exclude", columns=columns)
        if x_mask is not None:
            row, positive = (jnp.where(x_mask, a, jnp.zeros_like(a)) for a in (row, positive))
            col = jnp.where(y_mask, col, jnp.zeros_like(col)) if columns else None
        return weighted_sum((row, col, positive), weights)

    return jax.jit(jax.value_and_grad(value, argnums=[i for i, a in enumerate(args) if a is not None]))(*args)


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        pytest.param(name, options, marks=[] if number in CHOSEN.get(name, (0, 7)) else pytest.mark.full)
        for name in available_implementations()
        for number, options in enumerate(OPTIONS)
    ],
    ids=lambda o: "-".join(map(str, o.values())) if isinstance(o, dict) else o,
)
def test_options_match_oracle(options, implementation):
    args, local, masks, weights = case(**options)
    given = [i for i, a in enumerate(args) if a is not None]
    columns = options["scales"] != "rows_only"

    def value(*args):
        def inside(sharded, shared):
            x, y, x_scale, y_scale, labels, x_mask, y_mask, weights = sharded
            x_scale = shared[0] if x_scale is None else x_scale
            y_scale = shared[1] if y_scale is None else y_scale
            result = pairwise_lse(
                x,
                y,
                x_scale,
                y_scale,
                axis_name="data",
                positives=options["positives"],
                labels=labels,
                x_mask=x_mask,
                y_mask=y_mask,
                columns=columns,
                implementation=implementation,
            )
            return jax.lax.psum(weighted_sum(result, weights), "data")

        vectors = [a if a is None or a.ndim else None for a in args[2:]]
        scalars = [None if a is None or a.ndim else a for a in args[2:]]
        sharded = (*args[:2], *vectors, local, *masks, weights)
        return jax.shard_map(inside, mesh=oracle.mesh_of(DEVICES), in_specs=(P("data"), P()), out_specs=P())(
            sharded, scalars
        )

    with jax.enable_x64(True):
        args = tuple(None if a is None else jnp.asarray(a) for a in args)
        got_value, got = jax.jit(jax.value_and_grad(value, argnums=given))(*args)
        want_value, want = expected(**options)
        np.testing.assert_allclose(got_value, want_value, rtol=1e-11)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("output", "implementation"),
    [
        *((output, name) for output in ("row", "col", "positive") for name in ("xla", "ring")),
        *zip(("row", "col", "positive"), ("dense", "local", "disco"), strict=True),
    ],
)
def test_gradient_of_one_output_alone(output, implementation):
    x, y = oracle.features("random", 20, 20, 19)

    def inside(x, y, scale):
        result = pairwise_lse(x, y, scale, axis_name="data", implementation=implementation)
        return jax.lax.psum(getattr(result, output).sum(), "data")

    def value(x, y, scale):
        specs = (P("data"), P("data"), P())
        return jax.shard_map(inside, mesh=oracle.mesh_of(4), in_specs=specs, out_specs=P())(x, y, scale)

    def whole_matrix(x, y, scale):
        block = LseBlock(x, y, scale, labels=jnp.arange(20, dtype=jnp.int32))
        return dict(zip(("row", "col", "positive"), dense.dense_lse(block), strict=True))[output].sum()

    args = (x, y, jnp.float32(14.3))
    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*args) for f in (value, whole_matrix))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exclude", [False, True])
def test_oracle_against_finite_differences(exclude):
    with jax.enable_x64(True):
        x, y = (jnp.asarray(a, jnp.float64) for a in oracle.features("random", 4, 6, 3))
        labels = jnp.arange(4, dtype=jnp.int32)

        def value(x, y, x_scale, y_scale):
            row, col, positive = dense.dense_lse(LseBlock(x, y, x_scale, y_scale, labels=labels), exclude=exclude)
            return (row * row).sum() + (col * positive[0]).sum() + positive.sum()

        args = (x, y, jnp.linspace(3.0, 9.0, 4), jnp.linspace(2.0, 8.0, 6))
        check_grads(value, args, order=1, modes=["rev"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_oracle_against_plain_numpy(kind):
    x, y = oracle.features(kind, 9, 9, 5, np.float64)
    with jax.enable_x64(True):
        labels = jnp.arange(9, dtype=jnp.int32)
        row, col, positive = dense.dense_lse(LseBlock(jnp.asarray(x), jnp.asarray(y), jnp.float64(100), labels=labels))
    np.testing.assert_allclose(row, oracle.log_sum_exp(100 * x @ y.T, 1), rtol=1e-13)
    np.testing.assert_allclose(col, oracle.log_sum_exp(100 * x @ y.T, 0), rtol=1e-13)
    np.testing.assert_allclose(positive, (x * y).sum(1), rtol=1e-13)


@pytest.mark.parametrize("norm", [1.0, 40.0])
@pytest.mark.parametrize("kind", ["random", "adversarial"])
def test_sums_out_of_range_of_the_shared_shift_are_exact(kind, norm):
    """Sums out of range of the shared shift are recomputed with maxima.

    Causes are rows far below the shared shift, and features that are not normalized.
    """
    x, y = oracle.features(kind, 40, 30, 16)
    y = y * np.float32(norm)
    got = jax.jit(lambda x, y: pairwise_lse(x, y, 100.0, labels=np.zeros(40, np.int32)))(x, y)
    s = 100 * x.astype(np.float64) @ y.T.astype(np.float64)
    np.testing.assert_allclose(got.row, oracle.log_sum_exp(s, 1), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(got.col, oracle.log_sum_exp(s, 0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", available_implementations())
def test_empty_sums_are_minus_infinity_with_zero_gradient(implementation):
    x = y = np.ones((1, 4), np.float32)

    def row(x, y, scale):
        return pairwise_lse(x, y, scale, positives="exclude", implementation=implementation).row[0]

    value, gradients = jax.value_and_grad(row, argnums=(0, 1, 2))(x, y, 10.0)
    assert value == -np.inf
    assert not any(np.any(g) for g in gradients)


@pytest.mark.parametrize(
    "needs_grad",
    [LseGradient(y=False), LseGradient(x=False), LseGradient(x_scale=False), LseGradient(y=False, x_scale=False)],
)
def test_backend_computes_only_needed_gradients(needs_grad):
    """GEMMs of gradients that are not needed are absent from the program.

    A frozen tower saves 2 b^2 D.
    """
    x, y = oracle.features("random", 64, 64, 32)
    names = [i for i, want in enumerate((needs_grad.x, needs_grad.y, needs_grad.x_scale)) if want]

    def value(*args):
        return pairwise_lse(*args, implementation="ring").row.sum()

    text = jax.jit(jax.grad(value, argnums=names)).lower(x, y, jnp.float32(9)).as_text()
    everything = jax.jit(jax.grad(value, argnums=(0, 1, 2))).lower(x, y, jnp.float32(9)).as_text()
    missing = 2 * (int(not needs_grad.x) + int(not needs_grad.y))  # in the shared and in the general path
    assert everything.count("dot_general") - text.count("dot_general") == missing


def test_merged_log_sums_lose_nothing():
    exponents = np.random.default_rng(0).normal(scale=60, size=(5, 8)).astype(np.float32)
    sums = [xla._log_sum(jnp.asarray(p)[:, None], None, axis=1) for p in exponents]
    merged = sums[0]
    for other in sums[1:]:
        merged = merged.merge(other)
    np.testing.assert_allclose(merged.log(), oracle.log_sum_exp(exponents.astype(np.float64), 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.ones((6, 4), np.float32)}, "same D"),
        ({"x": np.ones((0, 3), np.float32)}, "at least one row"),
        ({"positives": "maybe"}, "include"),
        ({"labels": np.zeros(4, np.int32)}, "integer labels"),
        ({"labels": np.zeros(5, np.float32)}, "integer labels"),
        ({"labels": np.full(5, 6)}, r"labels in \[0, 6\)"),
        ({"x_scale": np.ones(4, np.float32)}, "x_scale"),
        ({"y_scale": np.ones(5, np.float32)}, "y_scale"),
        ({"y_scale": 1.0, "columns": False}, "columns=False"),
        ({"y_mask": np.ones(6, np.int32)}, "y_mask"),
        ({"axis_name": "data"}, "enclosing shard_map, got 'data'"),
        ({"implementation": "cuda"}, "implementation"),
    ],
)
def test_bad_input_is_a_one_line_error(change, message):
    args = {"x": np.ones((5, 3), np.float32), "y": np.ones((6, 3), np.float32), "x_scale": 1.0} | change
    with pytest.raises(ValueError, match=message) as error:
        pairwise_lse(**args)
    assert "\n" not in str(error.value)
