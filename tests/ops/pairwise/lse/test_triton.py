"""Triton kernels, interpreted or compiled without a GPU, or on one."""

import dataclasses
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_guide
import pytest
import triton_compile
import triton_interpreter
from fused_ids import check_ids
from gpus import ALONE

from infcl_jax import retrieval_loss
from infcl_jax.ops.pairwise import triton as kernels
from infcl_jax.ops.pairwise.implementations import TABLE
from infcl_jax.ops.pairwise.kernel_api import Window
from infcl_jax.ops.pairwise.lse.block import LseBlock, LseCotangents, LseGradient, PositiveCotangents
from infcl_jax.ops.pairwise.lse.fused import LseFused
from infcl_jax.ops.pairwise.lse.kernel_api import LseOperands, LseWeights
from infcl_jax.ops.pairwise.lse.triton import LseTriton
from infcl_jax.ops.pairwise.lse.xla import LseStrips

BF16 = ((0, 0),)
FP32 = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))
GRADIENT = ((0, 2), (1, 1), (0, 1), (1, 0), (0, 0))
WIDE = LseTriton(kernels.TritonConfig(block_m=32, block_n=64, block_d=16, group_m=2), 80)
TALL = LseTriton(kernels.TritonConfig(block_m=64, block_n=32, block_d=16, group_m=3), 80)
SHAPE = 192, 128, 32
WHOLE = Window(jnp.int32(0), jnp.int32(0), *SHAPE[:2])


@pytest.fixture
def interpreter(monkeypatch):
    triton_interpreter.install(monkeypatch)


def split(x, num_terms):
    out = []
    for _ in range(num_terms):
        out.append(x.astype(jnp.bfloat16))
        x = x - out[-1].astype(jnp.float32)
    return jnp.concatenate(out, axis=1)


def make(pairs, *, masked, per_sample, labels, guide=False, shape=SHAPE, seed=0):
    """Creates operands, and s in float64. Each threshold ties with a similarity of the guide, which is exact."""
    R, C, K = shape
    rng = np.random.default_rng(seed)
    num_terms = 1 + max(p for p, _ in pairs)
    x, y = (split(jnp.asarray(rng.normal(size=(n, K)) / np.sqrt(K), jnp.float32), num_terms) for n in (R, C))

    def vector(n, low=0.5, high=3.0):
        return jnp.asarray(rng.uniform(low, high, n), jnp.float32)

    def mask(n):
        return jnp.where(rng.random(n) < 0.2, jnp.inf, 0.0).astype(jnp.float32) if masked else jnp.zeros(n)

    row_masked, column_masked = mask(R), mask(C)
    operands = LseOperands(
        x,
        y,
        row_scale=vector(R) if per_sample else jnp.full(R, 2.5),
        row_shift=(vector(R) if per_sample else jnp.full(R, 1.5)) + row_masked,
        column_shift=vector(C) + column_masked if per_sample else column_masked if masked else None,
        column_scale=vector(C) if per_sample else None,
        row_masked=row_masked if per_sample else None,
        column_masked=column_masked if per_sample else None,
        labels=jnp.asarray(rng.integers(-C, 2 * C, R), jnp.int32) if labels else None,
    )
    if guide:
        guide_x, guide_y = (rng.integers(-3, 4, (n, 2 * K)) / 8 for n in (R, C))
        t = guide_x @ guide_y.T
        operands = operands._replace(
            guide_x=split(jnp.asarray(guide_x, jnp.float32), num_terms),
            guide_y=split(jnp.asarray(guide_y, jnp.float32), num_terms),
            row_threshold=jnp.asarray(t[np.arange(R), rng.integers(0, C, R)], jnp.float32),
            column_threshold=jnp.asarray(t[rng.integers(0, R, C), np.arange(C)], jnp.float32),
        )
    x, y = ([np.asarray(p, np.float64) for p in np.split(np.asarray(a, np.float32), num_terms, axis=1)] for a in (x, y))
    return operands, sum(x[p] @ y[q].T for p, q in pairs)


def expected(operands, s, exclude):
    """Computes row and column exponents and the positives' mask in float64."""
    given = {n: None if v is None else np.asarray(v, np.float64) for n, v in operands._asdict().items()}
    o = LseOperands(**given)
    if o.column_scale is None:
        d = np.zeros(s.shape[1]) if o.column_shift is None else o.column_shift
        row = column = o.row_scale[:, None] * s - (o.row_shift[:, None] + d)
    else:
        row = o.row_scale[:, None] * s - (o.row_shift[:, None] + o.column_masked)
        column = o.column_scale * s - (o.column_shift + o.row_masked[:, None])
    positive = np.zeros(s.shape, bool) if o.labels is None else o.labels[:, None] == np.arange(s.shape[1])
    if exclude:
        row, column = np.where(positive, -np.inf, row), np.where(positive, -np.inf, column)
    if o.guide_x is not None:
        t = o.guide_x @ o.guide_y.T  # the terms after the first are zeros
        row = np.where(t <= o.row_threshold[:, None], row, -np.inf)
        column = np.where(t <= o.column_threshold, column, -np.inf)
    return row, column, positive


def window_of(shape, size):
    """Returns the whole and a window that is not aligned to tiles."""
    whole = Window(jnp.int32(0), jnp.int32(0), *shape[:2])
    window = Window(jnp.int32(shape[0] - size - 32), jnp.int32(shape[1] - size - 32), size, size)
    return [(w, slice(int(w.row), int(w.row) + w.rows), slice(int(w.column), int(w.column) + w.columns))
            for w in (whole, window)]  # fmt: skip


VARIANTS = pytest.mark.parametrize(
    ("pairs", "masked", "per_sample", "labels", "exclude"),
    [
        (BF16, False, False, False, False),
        (BF16, True, False, True, False),
        (BF16, False, False, True, True),
        (BF16, True, True, True, True),
        (FP32, True, True, True, False),
        (FP32, False, False, True, True),
    ],
)


def close(a, b, tolerance=2e-6):
    """Compares with a tolerance relative to the largest value; infinities must agree."""
    finite = np.isfinite(b)
    a = np.asarray(a, np.float64)
    return np.array_equal(a[~finite], b[~finite]) and np.all(
        np.abs(a[finite] - b[finite]) <= tolerance * np.abs(b[finite]).max(initial=0)
    )


def check_sums(k, pairs, masked, per_sample, labels, exclude, guide=False, tolerance=2e-6, size=64, shape=SHAPE):
    operands, s = make(pairs, masked=masked, per_sample=per_sample, labels=labels, guide=guide, shape=shape)
    z_row, z_column, _ = expected(operands, s, exclude)
    for window, rows, columns in window_of(shape, size):
        for maxima in (False, True):
            options = {"exclude": exclude, "maxima": maxima, "guide_pairs": pairs}
            row, column = k.sums(operands, window, pairs, columns=True, **options)
            of_rows, of_columns = z_row[rows, columns], z_column[rows, columns]
            assert close(row, of_rows.max(1) if maxima else np.exp2(of_rows).sum(1), tolerance)
            assert close(column, of_columns.max(0) if maxima else np.exp2(of_columns).sum(0), tolerance)
            only_row, none = k.sums(operands, window, pairs, columns=False, **options)
            assert none is None
            assert np.array_equal(row, only_row)


def check_weights(
    k, pairs, masked, per_sample, labels, exclude, columns=True, guide=False, tolerance=2e-6, rounding=2, size=64,
    shape=SHAPE,
):  # fmt: skip
    """Checks dS and moments against float64.

    `rounding` is the error of bf16 relative to round-to-nearest; the interpreter rounds toward zero.
    """
    operands, s = make(pairs, masked=masked, per_sample=per_sample, labels=labels, guide=guide, shape=shape)
    z_row, z_column, positive = expected(operands, s, exclude)
    e_row, e_column = np.exp2(z_row), np.exp2(z_column)
    rng = np.random.default_rng(1)
    a, b, w = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in (s.shape[0], s.shape[1], s.shape[0]))
    a64, b64, w64 = (np.asarray(v, np.float64) for v in (a, b, w))
    whole = e_row * a64[:, None] + (e_column * b64 if columns else 0) + positive * w64[:, None]
    weights = LseWeights(a, b if columns else None, w if labels else None)
    for window, rows, cols in window_of(shape, size):
        d_s = whole[rows, cols]
        for terms in (1, 2):
            options = {"exclude": exclude, "terms": terms, "moments": terms == 2, "guide_pairs": pairs}
            got, row, column = k.ds(operands, weights, window, pairs, **options)
            assert got.dtype == jnp.bfloat16
            d_s_sum = sum(np.asarray(p, np.float64) for p in np.split(got, terms, axis=1))
            assert np.abs(d_s_sum - d_s).max() <= ((rounding * 2**-8) ** terms + tolerance) * np.abs(d_s).max()
            assert np.all(d_s_sum[d_s == 0] == 0)
        assert close(row, (e_row * s)[rows, cols].sum(1), tolerance)
        assert close(column, (e_column * s)[rows, cols].sum(0), tolerance) if columns else column is None


def check_positives(k, pairs, size):
    """Checks positives, and that they are bitwise equal to the tiles' values.

    With e = 1 for one column only, a row's moment is s itself.
    """
    operands, s = make(pairs, masked=False, per_sample=False, labels=False, shape=(size, size, 64))
    positives = k.positives(operands.x, operands.y, pairs)
    assert close(positives, np.diag(s))
    weights, window = LseWeights(jnp.ones(size), None, None), Window(jnp.int32(0), jnp.int32(0), size, size)
    for i in (0, size // 2 + 1, size - 1):
        one = operands._replace(
            row_scale=jnp.zeros(size),
            row_shift=jnp.zeros(size),
            column_shift=jnp.full(size, jnp.inf).at[i].set(0),
        )
        _, row, _ = k.ds(one, weights, window, pairs, exclude=False, terms=1, moments=True)
        assert row[i] == positives[i]


@VARIANTS
def test_sums(interpreter, pairs, masked, per_sample, labels, exclude):
    check_sums(WIDE if masked == labels else TALL, pairs, masked, per_sample, labels, exclude)


@VARIANTS
def test_weights(interpreter, pairs, masked, per_sample, labels, exclude):
    check_weights(WIDE, pairs, masked, per_sample, labels, exclude)


@pytest.mark.parametrize("per_sample", [False, True])
def test_weights_of_rows_only(interpreter, per_sample):
    check_weights(TALL, BF16, True, per_sample, True, False, columns=False)


@pytest.mark.parametrize(
    ("k", "pairs", "per_sample", "exclude"),
    [
        (WIDE, BF16, False, True),
        pytest.param(TALL, FP32, False, True, marks=pytest.mark.slow),
        pytest.param(WIDE, BF16, True, False, marks=pytest.mark.slow),
    ],
)
def test_guide(interpreter, k, pairs, per_sample, exclude):
    check_sums(k, pairs, True, per_sample, True, exclude, guide=True)
    check_weights(k, pairs, True, per_sample, True, exclude, guide=True)


@pytest.mark.parametrize(("k", "pairs"), [(WIDE, BF16), (TALL, FP32)], ids=["wide", "tall"])
def test_positives(interpreter, k, pairs):
    check_positives(k, pairs, 128)


def test_masked_rows_may_hold_anything(interpreter, monkeypatch):
    fused = dataclasses.replace(TABLE["triton"], backend=lambda *_: LseFused(WIDE))
    monkeypatch.setitem(TABLE, "triton", fused)
    args, options, check = oracle.masked_retrieval(dtype=jnp.bfloat16)
    loss = functools.partial(retrieval_loss, implementation="triton")
    with jax.sharding.use_abstract_mesh(ALONE):
        check(*jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args, **options), 2e-2)


@pytest.mark.parametrize(
    ("scale", "options"),
    [
        ("shared", {"multi_positive": "mean", "exclude": True, "dtype": jnp.float32, "tolerance": 1e-4}),
        pytest.param(
            *("per_sample", {"multi_positive": "any", "exclude": True, "dtype": jnp.float32, "tolerance": 4e-5}),
            marks=pytest.mark.slow,
        ),
        ("rows", {"multi_positive": "any", "exclude": False}),
    ],
)
def test_positives_by_id(interpreter, monkeypatch, scale, options):
    monkeypatch.setitem(TABLE, "triton", dataclasses.replace(TABLE["triton"], backend=lambda *_: LseFused(WIDE)))
    check_ids("triton", scale, bx=60, by=90, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("per_sample", "guide"), [(False, False), (True, False), (False, True)])
def test_blocks_of_a_ring_by_id(interpreter, per_sample, guide):
    """Columns of another device, sorted by the group numbers of all devices: some rows have no positive there."""
    rng = np.random.default_rng(6)
    bx, by = 70, 90
    x, y = oracle.features("random", bx, by, 24)
    groups = [jnp.asarray(np.sort(rng.integers(1, 50, n)), jnp.int32) for n in (bx, by)]
    scales = [jnp.asarray(rng.uniform(5, 30, n), jnp.float32) for n in (bx, by)]
    scales = scales if per_sample else [jnp.float32(20), None]
    block = LseBlock(jnp.asarray(x), jnp.asarray(y), *scales, x_ids=groups[0], y_ids=groups[1])
    if guide:
        features = [jnp.float32(rng.integers(-3, 4, (n, 24)) / 8) for n in (bx, by)]
        thresholds = [jnp.float32(rng.integers(-9, 99, n) / 64) for n in (bx, by)]
        names = ("x_guide", "y_guide", "x_threshold", "y_threshold")
        block = block._replace(**dict(zip(names, features + thresholds, strict=True)))
    fused, strips = LseFused(WIDE, exclude=True), LseStrips(exclude=True)
    got, want = (jax.jit(backend.forward)(block) for backend in (fused, strips))
    for a, b in ((got.row_positives, want.row_positives), (got.column_positives, want.column_positives)):
        np.testing.assert_allclose(a.lse.log(), b.lse.log(), rtol=1e-5)
        np.testing.assert_allclose(a.similarity, b.similarity, atol=2e-6)
    rows, columns = (jnp.asarray(rng.normal(size=(3, n)) / n, jnp.float32) for n in (bx, by))
    cotangents = LseCotangents(
        *(want.row, rows[0], want.column, columns[0], want.positive, None),
        PositiveCotangents(want.row_positives.lse, *rows[1:]),
        PositiveCotangents(want.column_positives.lse, *columns[1:]),
    )
    needs = LseGradient(y_scale=per_sample)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(backend, block, cotangents):
        acc = backend.accumulators(block, needs, jnp.float32)
        acc = backend.backward(block, cotangents, acc)
        return backend.gradient(block, cotangents, acc, needs)

    gradients = [gradient(backend, block, cotangents) for backend in (fused, strips)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert oracle.relative_error(a, b) <= 1e-4


@pytest.mark.parametrize(
    ("b", "dtype", "kind", "margin", "strategy", "by_id", "masked"),
    [
        pytest.param(70, jnp.bfloat16, "duplicates", 0.0, "absolute", False, True, marks=pytest.mark.slow),
        (50, jnp.float32, "random", 0.25, "relative", False, False),
        (60, jnp.bfloat16, "random", 0.125, "absolute", True, True),
    ],
)
def test_clip_with_a_guide(interpreter, monkeypatch, b, dtype, kind, margin, strategy, by_id, masked):
    monkeypatch.setitem(TABLE, "triton", dataclasses.replace(TABLE["triton"], backend=lambda *_: LseFused(WIDE)))
    with jax.sharding.use_abstract_mesh(ALONE):
        oracle_guide.check_clip("triton", b, dtype, kind, margin, strategy, by_id, masked)


def test_retrieval_with_a_guide(interpreter, monkeypatch):
    monkeypatch.setitem(TABLE, "triton", dataclasses.replace(TABLE["triton"], backend=lambda *_: LseFused(TALL)))
    with jax.sharding.use_abstract_mesh(ALONE):
        oracle_guide.check_retrieval("triton")


def test_infinite_shifts_are_exact_zeros(interpreter):
    operands, _ = make(BF16, masked=True, per_sample=False, labels=False)
    operands = operands._replace(row_shift=jnp.full(SHAPE[0], jnp.inf))
    row, column = WIDE.sums(operands, WHOLE, BF16, exclude=False, columns=True, maxima=False)
    assert not row.any()
    assert not column.any()


def test_sizes_must_be_multiples_of_the_tile():
    operands, _ = make(BF16, masked=False, per_sample=False, labels=False)
    with pytest.raises(ValueError, match=r"in multiples of \(32, 64, 16\), got \(33, 128, 32\)"):
        WIDE.sums(operands, dataclasses.replace(WHOLE, rows=33), BF16, exclude=False, columns=True, maxima=False)


def test_windows_of_dS_are_limited():
    operands, _ = make(BF16, masked=False, per_sample=False, labels=False)
    weights, window = LseWeights(jnp.ones(SHAPE[0]), None, None), dataclasses.replace(WHOLE, columns=1 << 25)
    with pytest.raises(ValueError, match="less than 2\\^31 elements"):
        WIDE.ds(operands, weights, window, BF16, exclude=False, terms=2, moments=False)


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.7", "8.9", "9.0"])
def test_gpus_from_ampere_to_hopper_have_tiles(capability):
    k = LseTriton.for_capability(capability)
    assert k.compute_capability == float(capability) * 10
    assert k.tile == (128, 128)


@pytest.mark.parametrize("capability", ["7.5", "10.0"])
def test_other_gpus_are_refused(capability):
    with pytest.raises(ValueError, match=rf"compute capability 8\.0 to 9\.0, got {capability}"):
        LseTriton.for_capability(capability)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"triton": None}, r"need jax-triton >= 0.4.1 and triton >= 3.7; install them with"),
        ({"triton": "3.6.0"}, r"need triton >= 3.7, got 3.6.0; install them with"),
        ({"triton": "3.10.1", "jax_triton": None}, r"need jax-triton >= 0.4.1; install them with"),
        (
            {"triton": "3.10.1", "jax_triton": "0.4.1", "jax_triton.triton_lib": "0.4.1"},
            r"jax-triton cannot be used with JAX [\d.]+ and triton 3\.10\.1: AttributeError: ",
        ),
    ],
)
def test_missing_or_unfit_packages_are_an_error(monkeypatch, modules, message):
    kernels.load.cache_clear()
    for name, version in modules.items():
        module = version and types.SimpleNamespace(__version__=version, language=None, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    operands, _ = make(BF16, masked=False, per_sample=False, labels=False)
    with pytest.raises(ImportError, match=message):
        WIDE.sums(operands, WHOLE, BF16, exclude=False, columns=True, maxima=False)


@pytest.mark.parametrize(
    ("package", "code", "message"),
    [
        (
            "triton",
            "raise OSError('libtriton.so:\\n  not found')",
            "triton cannot be imported: OSError: libtriton.so: not",
        ),
        ("triton", "import missing_module", "triton cannot be imported: ModuleNotFoundError: No module named 'missing"),
        (
            "jax_triton",
            "raise TypeError('2 arguments\\nbut 3')",
            r"with JAX [\d.]+ and triton [\d.]+: TypeError: 2 arg",
        ),
        (
            "jax_triton",
            "from jax import missing_name",
            r"jax-triton cannot be used with .*: ImportError: cannot import",
        ),
        ("jax_triton", "import jax.missing", r"jax-triton cannot be used with .*: ModuleNotFoundError: No module"),
    ],
)
def test_packages_whose_import_fails_are_an_error_of_one_line(monkeypatch, tmp_path, package, code, message):
    (tmp_path / f"{package}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    kernels.load.cache_clear()
    with pytest.raises(ImportError, match=message) as error:
        kernels.load()
    assert "\n" not in str(error.value)


KERNELS = """
from infcl_jax.ops.pairwise.lse.kernel_api import LseOperands, LseWeights, WeightsByID
from infcl_jax.ops.pairwise.lse.triton import KERNELS

def calls(k, w):
    shared, single = LseOperands(x, y, r, r, labels=labels), LseOperands(x, y, r, r, c, c, r, c, labels)
    weights = LseWeights(r, c, r)
    shared_ids, single_ids = shared._replace(last=labels), single._replace(last=labels)
    by_id = LseWeights(r, c, None, WeightsByID(r, r, c, c, scale=r[:1]))
    guide = {"guide_x": x, "guide_y": y, "row_threshold": r, "column_threshold": c}
    by_id_single = LseWeights(r, c, None, WeightsByID(r, r, c, c, row_shift=r, column_shift=c))
    return (
        k.sums(shared, w, one, exclude=False, columns=True, maxima=False),
        k.sums(single, w, six, exclude=True, columns=True, maxima=True),
        k.ds(shared, weights, w, one, exclude=False, terms=1, moments=False),
        k.ds(single, weights, w, six, exclude=True, terms=2, moments=True),
        k.positives(x, x, six),
        k.sums(shared_ids, w, one, exclude=True, columns=True, maxima=False),
        k.ds(shared_ids, by_id, w, one, exclude=True, terms=1, moments=False),
        k.ds(single_ids, by_id_single, w, six, exclude=False, terms=2, moments=True),
        k.positive_sums(shared_ids, six, maxima=False),
        k.positive_sums(shared_ids, one, maxima=True),
        k.sums(shared._replace(**guide), w, one, exclude=True, columns=True, maxima=False, guide_pairs=six),
        k.ds(shared._replace(**guide), weights, w, one, exclude=True, terms=1, moments=True, guide_pairs=one),
        k.ds(shared_ids._replace(**guide), by_id, w, six, exclude=True, terms=2, moments=False, guide_pairs=six),
    )

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spec = jax.sharding.PartitionSpec("data")

@jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
def sharded(x):
    k, o = KERNELS.for_capability("9.0"), LseOperands(x, x, x[:, 0].astype(jnp.float32), jnp.zeros(128))
    row, column = k.sums(o, Window(0, 0, 128, 128), one, exclude=False, columns=True, maxima=False)
    out = row, column, k.positives(x, x, one)
    assert all(jax.typeof(a).manual_axis_type.varying == {"data"} for a in out)
    return out

jax.eval_shape(sharded, x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", triton_compile.CAPABILITIES)
def test_kernels_compile_without_a_gpu(capability):
    triton_compile.check(capability, KERNELS, 13)


def device_kernels():
    return LseTriton.for_capability(jax.devices("gpu")[0].compute_capability)


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize("shape", [(256, 384, 64), (1280, 640, 576)])
def test_on_gpu(pairs, masked, per_sample, labels, exclude, shape):
    k = device_kernels()
    check_sums(k, pairs, masked, per_sample, labels, exclude, tolerance=2e-5, size=128, shape=shape)
    check_weights(k, pairs, masked, per_sample, labels, exclude, tolerance=2e-5, rounding=1, size=128, shape=shape)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [BF16, FP32])
def test_positives_on_gpu(pairs):
    check_positives(device_kernels(), pairs, 1024)


@pytest.mark.gpu
def test_duplicates_in_a_guide_stay_on_gpu():
    oracle_guide.check_duplicates("triton")
