"""Positives by id of `pairwise_lse`, with every option; `tests/losses/test_ids.py` has the losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P

from infcl_jax import pairwise_lse
from infcl_jax.ops.pairwise.ids import Order, is_match, match_ids, ranges_by_id, sort_block
from infcl_jax.ops.pairwise.lse import available_implementations
from infcl_jax.ops.pairwise.lse.block import LseBlock
from infcl_jax.ops.pairwise.lse.lone_positives import LonePositives

DEVICES, BX, BY, DIM = 4, 20, 28, 19
OPTIONS = [
    {"positives": "exclude", "multi_positive": "mean", "scale": "shared", "columns": True},
    {"positives": "include", "multi_positive": "mean", "scale": "per_sample", "columns": True},
    {"positives": "include", "multi_positive": "any", "scale": "shared", "columns": False},
    {"positives": "exclude", "multi_positive": "any", "scale": "long", "columns": True},  # beyond the shared shift
    {"positives": "exclude", "multi_positive": "mean", "scale": "shared", "columns": True, "ids": "lone"},
    {"positives": "include", "multi_positive": "any", "scale": "shared", "columns": True, "ids": "lone"},
]

# Every option in one of two rings; gathered columns are compared as those of "dense".
CHOSEN = {"xla": (0, 2, 4), "ring": (1, 3, 5), "local": (2,), "disco": (4,)}


def weighted_sum(result, axis_name):
    """A scalar with a different cotangent for every output of every row, for finite outputs."""
    row, col, positive = result
    outputs = [row, col, *positive.row[:2], *(positive.col or (None, None))[:2]]
    total = jnp.zeros_like(row, shape=())
    for i, output in enumerate(a for a in outputs if a is not None):
        finite = jnp.where(jnp.isfinite(output), output, jnp.zeros_like(output))
        first = jax.lax.axis_index(axis_name) * len(output) if axis_name else 0
        total += (
            finite * jnp.cos((i + 1) * (first + jnp.arange(len(output), dtype=jnp.int32))).astype(output.dtype)
        ).sum()
    return jax.lax.psum(total, axis_name) if axis_name else total


@functools.cache
def case(scale, kind):
    rng = np.random.default_rng(1)
    x, y = oracle.features("random", BX, BY, DIM, np.float64)
    ids = rng.integers(0, 12, (BX, 2)).astype(np.int32), rng.integers(0, 12, (BY, 2)).astype(np.int32)
    if kind == "lone":  # at most one positive of each row and column on each device
        each = BY // DEVICES
        ids = [np.concatenate([rng.permutation(each)[: n // DEVICES] for _ in range(DEVICES)]) for n in (BX, BY)]
        ids = [np.stack([n, n], 1).astype(np.int32) for n in ids]
    ids[0][:, 0] = ids[1][:, 0] = 3
    masks = rng.random(BX) < 0.8, rng.random(BY) < 0.8
    scales = (rng.uniform(5, 30, BX), rng.uniform(5, 30, BY)) if scale == "per_sample" else (np.float64(14.3), None)
    return (9 * x if scale == "long" else x, y, *scales), ids, masks


def value(args, ids, masks, options, axis_name, implementation):
    x, y, x_scale, y_scale = args
    result = pairwise_lse(
        x,
        y,
        x_scale,
        y_scale,
        axis_name=axis_name,
        positives=options["positives"],
        multi_positive=options["multi_positive"],
        x_ids=ids[0],
        y_ids=ids[1],
        x_mask=masks[0],
        y_mask=masks[1],
        columns=options["columns"],
        implementation=implementation,
    )
    return weighted_sum(result, axis_name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        pytest.param(name, options, marks=[] if number in CHOSEN.get(name, range(6)) else pytest.mark.full)
        for name in available_implementations()
        if name != "dense"
        for number, options in enumerate(OPTIONS)
    ],
    ids=lambda o: "-".join(map(str, o.values())) if isinstance(o, dict) else o,
)
def test_equals_dense_on_one_device(implementation, options):
    args, ids, masks = case(options["scale"], options.get("ids"))

    def sharded(args):
        specs = jax.tree.map(lambda a: P("data") if a.ndim else P(), (args, ids, masks))
        inside = functools.partial(value, options=options, axis_name="data", implementation=implementation)
        return jax.shard_map(inside, mesh=oracle.mesh_of(DEVICES), in_specs=specs, out_specs=P())(args, ids, masks)

    with jax.enable_x64(True):
        dense = functools.partial(value, options=options, axis_name=None, implementation="dense")
        want, expected = jax.jit(jax.value_and_grad(lambda args: dense(args, ids, masks)))(args)
        got, gradients = jax.jit(jax.value_and_grad(sharded))(args)
    assert float(got) == pytest.approx(float(want), rel=1e-12)
    for g, w in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(g, w) <= 1e-12


def test_groups_are_equal_ids_of_unmasked_rows():
    rng = np.random.default_rng(0)
    ids = [rng.integers(-2, 3, (n, 2)).astype(np.int32) for n in (30, 40)]
    masks = [rng.random(n) < 0.7 for n in (30, 40)]
    match = (ids[0][:, None] == ids[1][None]).all(2) & np.outer(*masks)
    groups = match_ids(*map(jnp.asarray, (*ids, *masks)), None)
    np.testing.assert_array_equal(groups.x[:, None] == groups.y[None], match)
    np.testing.assert_array_equal(groups.x_count, match.sum(1))
    np.testing.assert_array_equal(groups.y_count, match.sum(0))


def test_int64_ids_are_refused():
    ids = np.arange(8)
    with pytest.raises(ValueError, match=r"x_ids to be int32 .* got int64\[8\]; pass 64-bit ids as"):
        pairwise_lse(np.eye(8, dtype=np.float32), np.eye(8, dtype=np.float32), 1.0, x_ids=ids, y_ids=ids)


@pytest.mark.parametrize("kind", ["random", "equal", "unique"])
def test_positives_are_column_ranges_of_sorted_blocks(kind):
    """Of both sides, with masked rows and columns among the others."""
    rng = np.random.default_rng(0)
    ids = {
        "random": rng.integers(0, 9, (2, 40)),
        "equal": np.ones((2, 40)),
        "unique": np.stack([rng.permutation(40)] * 2),
    }
    x_ids, y_ids = ids[kind].astype(np.int32)
    masks = rng.random((2, 40)) < 0.8
    groups = match_ids(*map(jnp.asarray, (x_ids, y_ids[:33], masks[0], masks[1, :33])), None)
    features = [jnp.arange(n, dtype=jnp.float32)[:, None] for n in (40, 33)]
    block = LseBlock(*features, jnp.float32(1), x_ids=groups.x, y_ids=groups.y)
    in_order, *orders = sort_block(block)
    for order, a, b in zip(orders, (in_order.x, in_order.y), features, strict=True):
        np.testing.assert_array_equal(order.restore(a), b)
    match = is_match(in_order.x_ids, in_order.y_ids)
    for rows, columns, want in ((in_order.x_ids, in_order.y_ids, match), (in_order.y_ids, in_order.x_ids, match.T)):
        first, last = ranges_by_id(rows, columns)
        column = np.arange(want.shape[1])[None, :]
        np.testing.assert_array_equal((first[:, None] <= column) & (column <= last[:, None]), want)


def test_unique_ids_stay_in_place_over_all_devices():
    """Masked pairs too; extra columns, such as hard negatives, come in their own order."""
    ids = np.random.default_rng(0).permutation(60).astype(np.int32)
    mask = jnp.asarray(np.random.default_rng(1).random(40) < 0.8)
    groups = match_ids(jnp.asarray(ids[:40]), jnp.asarray(ids), mask, None, None)
    np.testing.assert_array_equal(Order.by(groups.x).rows, np.arange(40))
    np.testing.assert_array_equal(Order.by(groups.y).rows, np.arange(60))


def test_order_has_a_permutation_as_its_gradient():
    order = Order.by(jnp.asarray([5, 2, -4, 2], jnp.int32))
    np.testing.assert_array_equal(order.rows, [1, 3, 2, 0])
    weights = jnp.arange(4.0)
    np.testing.assert_array_equal(jax.grad(lambda a: (weights * order.sort(a)).sum())(weights), order.restore(weights))


@pytest.mark.parametrize(
    ("x_ids", "y_ids", "only"),
    [
        ([3, 4, 5], [5, 9, 3, 8], True),
        ([3, 4, 3], [5, 9, 3, 8], False),
        ([3, 4, 5], [5, 9, 3, 3], False),
        ([4, 4, 7], [5, 9, 3, 3], True),
    ],
    ids=["one", "in two rows", "in two columns", "none"],
)
def test_lone_positives_are_labels(x_ids, y_ids, only):
    groups = match_ids(jnp.int32(x_ids), jnp.int32(y_ids), None, None, None)
    features = (jnp.zeros((len(ids), 2)) for ids in (x_ids, y_ids))
    lone = LonePositives.of(LseBlock(*features, jnp.float32(1), x_ids=groups.x, y_ids=groups.y))
    assert lone.only == only
    if only:
        assert lone.labels.tolist() == [y_ids.index(i) if i in y_ids else -1 for i in x_ids]
