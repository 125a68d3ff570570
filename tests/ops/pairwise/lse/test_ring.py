"""Rings over one or several mesh axes: results, transfers and overlap."""

import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from infcl_jax import clip_loss, pairwise_lse, siglip_loss
from infcl_jax.ops.pairwise import ring
from infcl_jax.ops.pairwise.lse import dense
from infcl_jax.ops.pairwise.lse.block import LseBlock

AXES = ("host", "device")
SHAPES = [(8,), (2, 4), (4, 2), (1, 8), (8, 1), (2, 2, 2)]
# An axis of one device changes no transfer; see test_axes_of_one_device_need_no_transfers.
MARKS = {(8, 1): pytest.mark.full, (1, 8): pytest.mark.slow, (4, 2): pytest.mark.slow, (2, 2, 2): pytest.mark.slow}


def mesh_of(shape):
    names = ("rack", *AXES)[-len(shape) :]
    return Mesh(np.array(jax.devices()).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


@pytest.mark.parametrize(
    ("shape", "general", "columns"),
    [
        pytest.param(shape, number % 2 == 1, 1 + number % 2, marks=MARKS.get(shape, []))
        for number, shape in enumerate(SHAPES)
    ],
    ids=str,
)
def test_any_mesh_matches_oracle(monkeypatch, shape, general, columns):
    """Compares any mesh shape with the dense reference.

    General cases have per-sample scales, masks, labels and excluded positives, and two slices per block instead of
    four.
    """
    monkeypatch.setattr(ring, "SLICE_MULTIPLE", columns)
    monkeypatch.setattr(ring, "MIN_SLICE", columns)
    devices, bx, by = 8, 3, 4
    mesh, rng = mesh_of(shape), np.random.default_rng(1)
    x, y = oracle.features("random", bx * devices, by * devices, 11, np.float64)
    local = rng.integers(0, by, bx * devices).astype(np.int32)
    weights = [rng.normal(size=n * devices) for n in (bx, by, bx)]
    options, scales, masks = {}, (np.float64(14.3),), (None, None)
    if general:
        options = {"positives": "exclude"}
        scales = tuple(rng.uniform(5, 30, n * devices) for n in (bx, by))
        masks = tuple(rng.random(n * devices) < 0.7 for n in (bx, by))
    batch = P(mesh.axis_names)

    def value(x, y, *scales):
        def inside(x, y, scales, labels, masks, weights):
            kept = dict(zip(("x_mask", "y_mask"), masks, strict=True))
            result = pairwise_lse(x, y, *scales, axis_name=mesh.axis_names, labels=labels, **kept, **options)
            return jax.lax.psum(sum((a * w).sum() for a, w in zip(result, weights, strict=True)), mesh.axis_names)

        specs = (batch, batch, batch if general else P(), batch, batch, batch)
        sharded = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=P())
        return sharded(x, y, scales, local, masks, weights)

    def expected(x, y, *scales):
        labels = jnp.asarray(local + np.repeat(np.arange(devices), bx) * by, jnp.int32)
        x_scale, y_scale = scales if general else (*scales, None)
        result = dense.dense_lse(LseBlock(x, y, x_scale, y_scale, *masks, labels), exclude=general)
        keep = (masks[0], masks[1], masks[0]) if general else (True,) * 3
        terms = (jnp.where(k, a, jnp.zeros_like(a)) * w for a, k, w in zip(result, keep, weights, strict=True))
        return sum(term.sum() for term in terms)

    with jax.enable_x64(True):
        args = tuple(jnp.asarray(a) for a in (x, y, *scales))
        masks = tuple(None if m is None else jnp.asarray(m) for m in masks)
        got, want = (jax.jit(jax.value_and_grad(f, argnums=tuple(range(len(args)))))(*args) for f in (value, expected))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "masked", "shape"),  # every value; with the mark full every pair
    [
        pytest.param(clip_loss, True, (4, 2), marks=pytest.mark.slow),
        (siglip_loss, False, (2, 4)),
        pytest.param(clip_loss, False, (2, 4), marks=pytest.mark.full),
        pytest.param(siglip_loss, True, (2, 4), marks=pytest.mark.full),
        pytest.param(siglip_loss, False, (4, 2), marks=pytest.mark.full),
    ],
)
def test_ring_of_rings_matches_flat_ring(loss, shape, masked):
    x, y = (jnp.asarray(a) for a in oracle.features("aligned", 40, 40, 16))
    mask = jnp.arange(40) % 3 != 1 if masked else None
    scalars = (jnp.float32(20.0), jnp.float32(-5.0))[: 2 if loss is siglip_loss else 1]

    def results(mesh):
        def value(x, y, *scalars):
            return loss(x, y, *scalars, mesh=mesh, axis_name=mesh.axis_names, mask=mask)

        return jax.jit(jax.value_and_grad(value, argnums=tuple(range(2 + len(scalars)))))(x, y, *scalars)

    for a, b in zip(jax.tree.leaves(results(mesh_of(shape))), jax.tree.leaves(results(mesh_of((8,)))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-7)


def permutes_of(inside, shape, operands):
    """Lists the permutes of a program in order.

    Each is (operand, whether between hosts, number of comparisons it waits for).
    """
    mesh = mesh_of(shape)
    f = jax.shard_map(inside, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names))
    text = jax.jit(f).lower(*operands).as_text(dialect="hlo")
    waits, permutes = {}, []
    for name, kind, opcode, operands, rest in re.findall(r"(\S+) = (\S+?\]|\().*? ([\w-]+)\((.*?)\)(.*)", text):
        waits[name] = set().union(*(waits.get(a.split(" ")[-1], set()) for a in operands.split(", ")))
        if opcode == "dot":
            waits[name] |= {name}
        if opcode == "collective-permute":
            pairs = re.findall(r"\{(\d+),(\d+)\}", rest)
            between = any(int(a) // shape[-1] != int(b) // shape[-1] for a, b in pairs)
            permutes.append(("y" if ",5]" in kind else "remote", between, len(waits[name])))
    return permutes


def permutes_of_sweep(shape):
    def inside(x, y):
        def compare(columns, own):
            s = x @ columns.T
            return s.sum(1), s.sum(0)

        return ring.sweep(compare, y, jnp.add, mesh_of(shape).axis_names)

    return permutes_of(inside, shape, (jnp.ones((16, 5)), jnp.ones((16, 5))))


def test_transfers_overlap_with_the_compute_of_a_step():
    """A step's transfers depend only on comparisons before the previous step.

    Transfers for step t + 1 can overlap with all of step t.
    """
    permutes = permutes_of_sweep((8,))
    y, remote = ([wait for what, _, wait in permutes if what == kind] for kind in ("y", "remote"))
    assert y == list(range(7))
    assert remote == list(range(1, 9))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_arrive_during_the_compute_of_the_slice_before(slices, last):
    """Only one slice at a time is in memory twice.

    A single slice must wait for its own comparison.
    """

    def inside(x, *slices):
        def compare(i, column_slice, local, remote, own):
            s = x @ column_slice.T
            return local + s.sum(1, keepdims=True), remote + s.sum(0)[:, None]

        zeros = [0 * column_slice[:, :1] for column_slice in slices]
        return ring._step(compare, (slices, zeros[0], zeros), ("device",), own=False, last=last)

    permutes = permutes_of(inside, (8,), [jnp.ones((16, 5))] * (1 + slices))
    y, remote = (sorted(wait for what, _, wait in permutes if what == kind) for kind in ("y", "remote"))
    expected = list(range(slices))[: slices - 1 if last else None]
    assert y == expected
    assert remote == ([1] if slices == 1 and not last else expected)


def test_few_transfers_between_hosts_overlap_with_inner_rotations():
    permutes = permutes_of_sweep((2, 4))
    y, remote = (sorted(wait for what, host, wait in permutes if host and what == kind) for kind in ("y", "remote"))
    assert y == [0]
    assert remote == [4, 8]
    assert sum(what == "y" for what, host, _ in permutes if not host) == 2 * 3


@pytest.mark.parametrize("shape", [(1, 8), (8, 1)], ids=str)
def test_axes_of_one_device_need_no_transfers(shape):
    flat, other = ([(what, wait) for what, _, wait in permutes_of_sweep(s)] for s in ((8,), shape))
    assert flat == other


def executed(jaxpr, times=1):
    """Yields (axes, shape) of every executed permute of a jaxpr.

    LseSums are assumed to stay in range, so that no `while` runs.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            yield from [(eqn.params["axis_name"], eqn.invars[0].aval.shape)] * times
        for inner in jax.extend.core.jaxprs_in_params({} if eqn.primitive.name == "while" else eqn.params):
            yield from executed(inner, times * eqn.params.get("length", 1))


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_blocks_cross_hosts_once_per_host(shape):
    hosts, devices = shape
    mesh = mesh_of(shape)

    def loss(x, y):
        return clip_loss(x, y, 20.0, mesh=mesh, axis_name=AXES, implementation="ring")

    x = jnp.ones((16, 5))
    forward = list(executed(jax.make_jaxpr(loss)(x, x).jaxpr))
    assert forward.count((("host",), (2, 5))) == hosts - 1
    assert forward.count((("device",), (2, 5))) == hosts * (devices - 1)
    both = list(executed(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, x).jaxpr))
    assert both.count((("host",), (2, 5))) == 3 * (hosts - 1)  # again in the backward pass, with the gradient
    assert both.count((AXES, (2, 5))) == 1  # the backward pass starts with each device's furthest block


@pytest.mark.parametrize("columns", [40, 256, 300, 1000, 20_000])
def test_slices_keep_the_padding_of_accumulators(columns):
    """Kernels pad accumulators to whole tiles, also in blocks with fewer columns than a slice."""
    padded = -(-columns // 256) * 256
    tree = (np.arange(columns), np.arange(padded))

    slices = ring.split(tree)
    for index, array in enumerate(tree):
        np.testing.assert_array_equal(np.concatenate([arrays[index] for _, arrays in slices]), array)
