"""Memory, communication and FLOPs of gradient caching."""

import collections
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from towers import RNG, SEPARATE, batch_sharding, cached, contrastive, image_tower, mlp_batch, mlp_params, place

from infcl_jax import Replay
from infcl_jax.grad_cache import DERIVED


@pytest.mark.parametrize("offload", ["none", "host"])
def test_keeping_everything_encodes_once(offload):
    """Count encodings per chunk as they run."""
    calls = []

    def counted(params, chunk, rng):
        jax.debug.callback(lambda _: calls.append(None), chunk[0, 0])
        return image_tower(params, chunk, rng)

    counts = []
    for keep in (0, 2, 4):
        calls.clear()
        f = cached({"image": counted}, lambda p, f: f["image"].sum(), offload, chunk_size=8, keep=keep)
        jax.block_until_ready(f(mlp_params(), mlp_batch(32)))
        jax.effects_barrier()
        counts.append(len(calls))
    assert counts == [8, 6, 4]


@pytest.mark.parametrize("offload", ["none", "host"])
def test_what_is_kept_by_name_is_computed_once(offload):
    """Four chunks; one stores all activations."""
    calls = []

    def counted(chunk):
        calls.append(None)
        return chunk

    def encode(params, chunk, rng):
        seen = jax.pure_callback(counted, jax.typeof(chunk), jax.lax.stop_gradient(chunk))
        return checkpoint_name(seen, "seen") * params

    counts = []
    for names in ((), ("seen",)):
        calls.clear()
        f = cached({"e": encode}, lambda p, f: (f["e"] ** 2).sum(), offload, chunk_size=8, keep=1, keep_names=names)
        jax.block_until_ready(f(jnp.float32(2), {"e": np.ones((32, 4), np.float32)}))
        counts.append(len(calls))
    assert counts == [7, 4]


def test_rows_stay_on_their_devices():
    """Communication is one gradient reduction after the loops, plus the loss's own."""
    sharding = batch_sharding(4)
    params, batch = place(mlp_params(), mlp_batch(32), "none", sharding)

    def compiled(loss):
        return cached(SEPARATE, loss, chunk_size=8, sharding=sharding).lower(params, batch, RNG).compile().as_text()

    hlo = compiled(lambda params, f: jnp.exp(params["log_scale"]) * jnp.sum(f["image"] * f["text"]))
    assert "all-gather" not in hlo and "all-to-all" not in hlo and "collective-permute" not in hlo
    computations = {c.split(" ", 1)[0].lstrip("%"): c for c in hlo.split("\n\n") if c.strip()}
    bodies = re.findall(r"body=%?([\w.\-]+)", hlo)
    assert bodies and "all-reduce" in hlo
    assert not any("all-reduce" in computations[body] for body in bodies)
    hlo = compiled(functools.partial(contrastive, mesh=sharding.mesh))
    assert "all-gather" not in hlo and "all-to-all" not in hlo


def temporary_bytes(rows, chunk_size, keep=0, width=512):
    """Temporary bytes of a compiled step with one large activation, the hidden layer."""
    f = cached(SEPARATE, lambda p, f: (f["image"] * f["text"]).sum() * p["log_scale"], chunk_size=chunk_size, keep=keep)
    batch = {name: jax.ShapeDtypeStruct((rows, 8), jnp.float32) for name in ("image", "text")}
    params = jax.eval_shape(lambda: mlp_params(width))
    return f.lower(params, batch, RNG).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_batch():
    features = 4 * 16 * 4  # two towers' features and their gradients, bytes per row
    small, large = (temporary_bytes(rows, 64) for rows in (1024, 16384))
    assert large - small < 2 * features * (16384 - 1024)
    assert 4 * large < temporary_bytes(16384, 16384)


def test_kept_activations_hold_no_weights():
    """A chunk of one row stores about one row of activations, and no weights."""
    rows, width = 16, 8192
    grown = temporary_bytes(rows, 1, keep=rows, width=width) - temporary_bytes(rows, 1, keep=2, width=width)
    assert grown < 2 * rows * 6 * 4 * width  # the weights of one tower would be 24 such rows


def test_what_is_derived_from_parameters_alone_is_computed_once():
    """Neither pass computes it in its loop over chunks."""

    def encode(params, chunk, rng):
        used = checkpoint_name(jnp.sinh(jax.lax.stop_gradient(params)), DERIVED)
        return jnp.tanh(chunk @ used) @ params.T

    f = cached({"e": encode}, lambda p, f: (f["e"] ** 2).sum(), chunk_size=8)
    batch = {"e": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
    step = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8, 4), jnp.float32), batch).eqns[0].params["jaxpr"]
    loops = [str(eqn) for eqn in step.eqns if eqn.primitive.name == "scan"]
    assert [loop.count("tanh") for loop in loops] == [1, 1]
    assert not any("sinh" in loop for loop in loops) and str(step).count("sinh") == 1


def test_host_form_waits_for_room():
    """Chunks are read as they are computed, not all at once."""
    times, alive = [], []

    def slow(params, chunk, rng):
        return chunk[:, :2] + jax.lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ params), params)[:1, :2]

    def load(number):
        times.append(time.monotonic())
        alive.append(sum(array.shape == (5, 3) for array in jax.live_arrays()))
        return np.ones((5, 3), np.float32)

    f = cached({"e": slow}, lambda p, f: f["e"].sum(), "host", chunk_size=5)
    for _ in range(2):  # the first call compiles
        times.clear()
        jax.block_until_ready(f(jnp.ones((400, 400)), {"e": Replay(60, load)}))
        times.append(time.monotonic())
    first, second = np.diff(times[:12]).sum(), np.diff(times[12:24]).sum()
    assert len(times) == 25 and max(alive) <= 2
    assert first > 0.5 * (times[12] - times[0]) and second > 0.5 * (times[24] - times[12])


def test_host_form_holds_of_a_chunk_what_is_kept_by_name_alone():
    """Neither its input nor copies of the parameters."""
    alive = []

    def encode(params, chunk, rng):
        return checkpoint_name(jnp.tanh(chunk @ params["in"]), "hidden") @ params["out"]

    def load(number):
        alive.append(collections.Counter(array.shape for array in jax.live_arrays()))
        return np.ones((5, 3), np.float32)

    f = cached({"e": encode}, lambda p, f: (f["e"] ** 2).sum(), "host", chunk_size=5, keep_names=("hidden",))
    jax.block_until_ready(f({"in": jnp.ones((3, 7)), "out": jnp.ones((7, 2))}, {"e": Replay(20, load)}))
    first, second = alive[0], alive[4]
    assert len(alive) == 8 and second[5, 7] == 4 and second[5, 3] <= 1
    # Of the parameters' shapes there are also the gradients of the loss itself, and the sums.
    assert all(second[shape] == first[shape] + 2 for shape in ((3, 7), (7, 2)))


def test_host_form_compiles_the_encoder_for_a_chunk_not_for_a_batch():
    traces = []

    def traced(params, chunk, rng):
        traces.append(chunk.shape)
        return image_tower(params, chunk, rng)

    f = cached({"e": traced}, lambda p, f: f["e"].sum(), "host", chunk_size=8, keep=1)
    first = [f(mlp_params(), {"e": mlp_batch(rows)["image"]}, RNG) and len(traces) for rows in (16, 16, 64)]
    assert first[0] == first[1] == first[2]
