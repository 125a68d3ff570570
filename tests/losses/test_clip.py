import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from infcl_jax import clip_loss, siglip_loss
from infcl_jax.ops.pairwise.lse import available_implementations

SCALES = (1.0, 14.3, 100.0)


@functools.cache
def value_and_grad(implementation, devices):
    mesh = oracle.mesh_of(devices)
    return jax.jit(
        jax.value_and_grad(lambda *args: clip_loss(*args, mesh=mesh, implementation=implementation), argnums=(0, 1, 2))
    )


def assert_matches_oracle(implementation, devices, rows, dim, dtype, kind, scale):
    b = devices * rows
    image, text = oracle.features(kind, b, b, dim, dtype)
    loss, (d_image, d_text, d_scale) = value_and_grad(implementation, devices)(image, text, jnp.float32(scale))
    expected_loss, (expected_image, expected_text, expected_scale) = oracle.clip(image, text, np.float32(scale))
    rounding = float(jnp.finfo(jnp.float32).eps)
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=rounding * scale)
    assert d_scale == pytest.approx(expected_scale, rel=1e-5, abs=10 * rounding)
    assert d_image.dtype == d_text.dtype == dtype
    for got, expected in ((d_image, expected_image), (d_text, expected_text)):
        tolerance = (1e-2 if dtype == jnp.bfloat16 else 1e-5) * np.linalg.norm(expected)
        if kind == "aligned":  # the true gradient all but cancels: an absolute bound, wider where JAX differentiates
            roundings = 2 if implementation in ("dense", "local") else 1
            tolerance = max(tolerance, roundings * float(jnp.finfo(dtype).eps) * scale / np.sqrt(b))
        assert oracle.absolute_error(got, expected) <= tolerance


SHARED = 4, 13, 96  # devices, rows of each, dimension: the shape of several tests, compiled once
# Every number of devices and every dimension with the two rings, both dtypes with every implementation.
CASES = [(4, 96, jnp.float32), (2, 640, jnp.bfloat16), (1, 33, jnp.float32), (8, 384, jnp.bfloat16)]


@pytest.mark.parametrize(
    ("implementation", "devices", "dim", "dtype"),
    [(name, *case) for name in available_implementations() for case in CASES[: 4 if name in ("xla", "ring") else 2]],
)
def test_matches_oracle(implementation, devices, dim, dtype):
    for kind in oracle.KINDS:
        for scale in SCALES:
            assert_matches_oracle(implementation, devices, SHARED[1], dim, dtype, kind, scale)


@pytest.mark.parametrize(("devices", "dtype"), [(1, jnp.float32), (1, jnp.bfloat16), (2, jnp.float32)])
def test_odd_strips(devices, dtype):
    for kind in oracle.KINDS:
        assert_matches_oracle("xla", devices, 521, 33, dtype, kind, 100.0)


@pytest.mark.parametrize("implementation", available_implementations())
def test_same_gradients_on_any_number_of_devices(implementation):
    with jax.enable_x64(True):
        args = [jnp.asarray(a, jnp.float64) for a in (*oracle.features("random", 24, 24, 33), 14.3)]
        results = [value_and_grad(implementation, n)(*args) for n in (1, 8)]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15), *results)


@pytest.mark.usefixtures("compiled_afresh")
@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_two_runs_are_bitwise_equal(implementation):
    args = (*oracle.features("random", 104, 104, 33), jnp.float32(100))
    first, second = (value_and_grad(implementation, 8)(*args) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    ("implementation", "devices"), [("xla", 1), ("local", 1), *((name, 4) for name in available_implementations())]
)
def test_mask_equals_leaving_out(implementation, devices):
    b = 8 * devices
    image, text = oracle.features("random", b, b, 33)
    keep = np.random.default_rng(1).random(b) < 0.6
    keep[-8:] = devices == 1  # a device with nothing but padding
    keep[0] = True
    mesh = oracle.mesh_of(devices)

    def loss(image, text, scale):
        return clip_loss(image, text, scale, mesh=mesh, mask=keep, implementation=implementation)

    loss, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(image, text, jnp.float32(14.3))
    expected_loss, (d_image, d_text, d_scale) = oracle.clip(image[keep], text[keep], np.float32(14.3))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients[2] == pytest.approx(d_scale, rel=1e-5)
    for got, expected in zip(gradients[:2], (d_image, d_text), strict=True):
        assert oracle.relative_error(got[keep], expected) <= 1e-5
        assert not np.any(np.asarray(got)[~keep])


def test_no_valid_pair_gives_zero():
    image, text = oracle.features("random", 8, 8, 5)
    value_and_grad = jax.jit(jax.value_and_grad(clip_loss, argnums=(0, 1, 2)))
    loss, gradients = value_and_grad(image, text, 10.0, mask=np.zeros(8, bool))
    assert loss == 0
    assert not any(np.any(g) for g in gradients)


def test_fp16_and_per_device_call():
    image, text = oracle.features("random", 32, 32, 33, jnp.float16)
    mesh = oracle.mesh_of(8)
    inside = jax.shard_map(
        lambda i, t: clip_loss(i, t, 20.0, axis_name="data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    assert jax.jit(inside)(image, text) == pytest.approx(oracle.clip(image, text, 20.0)[0], rel=1e-5)


def test_gradient_inside_shard_map_is_the_gradient_of_the_global_mean():
    image, text = oracle.features("random", 32, 32, 33)
    mesh = oracle.mesh_of(4)

    def gradients(image, text, scale):
        return jax.grad(lambda *a: clip_loss(*a, axis_name="data"), argnums=(0, 1, 2))(image, text, scale)

    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=(P("data"), P("data"), P())
    )
    got = jax.jit(sharded)(image, text, jnp.float32(14.3))
    for a, b in zip(got, oracle.clip(image, text, np.float32(14.3))[1], strict=True):
        assert oracle.relative_error(a, b) <= 1e-5


@pytest.mark.parametrize("implementation", ["dense", "ring", "disco"])
def test_gradient_through_an_unchecked_shard_map(implementation):
    image, text = oracle.features("random", 32, 32, 33)

    def inside(image, text, scale):
        return clip_loss(image, text, scale, axis_name="data", implementation=implementation)

    specs = (P("data"), P("data"), P())
    loss = jax.shard_map(inside, mesh=oracle.mesh_of(4), in_specs=specs, out_specs=P(), check_vma=False)
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(image, text, jnp.float32(14.3))
    for a, b in zip(got, oracle.clip(image, text, np.float32(14.3))[1], strict=True):
        assert oracle.relative_error(a, b) <= 1e-5


@pytest.mark.parametrize(
    ("implementation", "scale"), [*zip(available_implementations(), itertools.cycle((20.0, 60.0))), ("xla", 60.0)]
)
def test_confident_pairs_keep_relative_precision(implementation, scale):
    """Losses and gradients of 1e-8 and 1e-25, far below fp32's resolution of the logits."""
    devices, rows_per_device, dim = SHARED
    b = devices * rows_per_device
    rows = np.eye(b, dim, dtype=np.float32)
    text = oracle.unit(rows + 1e-2 * np.random.default_rng(0).normal(size=rows.shape)).astype(np.float32)
    got, gradients = value_and_grad(implementation, devices)(rows, text, jnp.float32(scale))
    negative, positive = np.asarray(rows, np.float64) @ text.T, (rows.astype(np.float64) * text).sum(1)
    negative = scale * np.where(np.eye(b), -np.inf, negative)
    excess = [oracle.log_sum_exp(negative, axis) - scale * positive for axis in (1, 0)]
    assert got == pytest.approx(np.logaddexp(0, excess).mean(), rel=2e-5)
    share = [1 / (1 + np.exp(-e)) / (2 * b) for e in excess]
    p = share[0][:, None] * np.exp(negative - oracle.log_sum_exp(negative, 1)[:, None])
    p += share[1] * np.exp(negative - oracle.log_sum_exp(negative, 0))
    d_z = p - np.diag(share[0] + share[1])
    for a, b in zip(gradients, (scale * d_z @ text, scale * d_z.T @ rows), strict=False):
        assert oracle.relative_error(a, b) <= 2e-5
    assert gradients[2] == pytest.approx((d_z * (np.asarray(rows, np.float64) @ text.T)).sum(), rel=2e-5)


@pytest.mark.parametrize("implementation", available_implementations())
def test_a_row_opposite_to_a_cone(implementation):
    """Its exponentials vanish against the shared max-shift, so the sums take the general path."""
    devices, rows, dim = SHARED
    noise = np.random.default_rng(0).normal(size=(devices * rows, dim))
    text = oracle.unit(np.ones_like(noise) + 0.8 * noise).astype(np.float32)
    image = text.copy()
    image[-1] = -1 / np.sqrt(dim)
    loss, gradients = value_and_grad(implementation, devices)(image, text, jnp.float32(100))
    expected_loss, expected = oracle.clip(image, text, 100.0)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for got, want in zip(gradients, expected, strict=True):
        assert oracle.relative_error(got, want) <= 1e-5


@pytest.mark.parametrize("loss", [clip_loss, functools.partial(siglip_loss, logit_bias=-10.0)])
def test_eager_calls_over_a_mesh_equal_one_device(loss):
    image, text = oracle.features("random", 24, 24, 33)
    eager = jax.value_and_grad(functools.partial(loss, mesh=oracle.mesh_of(8)), argnums=(0, 1, 2))
    results = [f(image, text, 14.3) for f in (eager, jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))))]
    assert loss(image, text, 14.3, mesh=oracle.mesh_of(8)) == results[0][0]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), *results)


@pytest.mark.parametrize("loss", [clip_loss, functools.partial(siglip_loss, logit_bias=-10.0)])
def test_sharded_features_need_an_axis_name(loss):
    image, text = oracle.features("random", 24, 24, 33)

    def mean(**where):
        def inside(image, text, scale):
            value, gradient = jax.value_and_grad(lambda s: loss(image, text, s, **where))(scale)
            return jax.lax.pmean(value, "data"), gradient

        specs = (P("data"), P("data"), P())
        return jax.jit(jax.shard_map(inside, mesh=oracle.mesh_of(8), in_specs=specs, out_specs=P()))(image, text, 14.3)

    with pytest.raises(ValueError, match=r"axes \['data'\], got None; pass axis_name='data', or axis_name=\(\)"):
        mean()
    with pytest.raises(ValueError, match=r"axes \['data'\], got mesh; pass axis_name='data' without a mesh"):
        mean(mesh=oracle.mesh_of(8))
    of_rows = jax.jit(jax.value_and_grad(lambda s, *rows: loss(*rows, s)))
    values, gradients = zip(*(of_rows(14.3, image[i : i + 3], text[i : i + 3]) for i in range(0, 24, 3)), strict=True)
    assert mean(axis_name=()) == pytest.approx((np.mean(values), np.sum(gradients)), rel=1e-5)
    assert mean(axis_name="data") == pytest.approx([float(a) for a in of_rows(14.3, image, text)], rel=1e-5)


def test_mesh_with_two_batch_axes_and_explicit_axes():
    image, text = oracle.features("random", 32, 32, 33)
    expected = oracle.clip(image, text, 20.0)[0]
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    for axes in ("data", ("replica", "data"), None):
        assert jax.jit(lambda i, t, a=axes: clip_loss(i, t, 20.0, mesh=mesh, axis_name=a))(
            image, text
        ) == pytest.approx(expected, rel=1e-6)
    explicit = jax.make_mesh((8,), ("data",))
    assert jax.jit(lambda i, t: clip_loss(i, t, 20.0, mesh=explicit))(image, text) == pytest.approx(expected, rel=1e-6)


def test_memory_is_linear_in_the_batch():
    devices = 4

    def workspace(b):
        shapes = jax.ShapeDtypeStruct((b, 64), jnp.bfloat16)
        f = value_and_grad("xla", devices)
        return f.lower(shapes, shapes, jax.ShapeDtypeStruct((), jnp.float32)).compile().memory_analysis()

    small, large = workspace(4096), workspace(16384)
    assert large.temp_size_in_bytes <= 4.2 * small.temp_size_in_bytes
    assert large.temp_size_in_bytes < 16384 * 16384 / devices  # far from the pair matrix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": np.zeros((8, 4), np.float32)}, "same shape"),
        ({"image": np.zeros((8, 3), np.int32), "text": np.zeros((8, 3), np.int32)}, "floating dtype"),
        ({"text": np.zeros((8, 3), np.float16)}, "floating dtype"),
        ({"implementation": "fastest"}, "implementation"),
        ({"logit_scale": np.ones(8, np.float32)}, "logit_scale"),
        ({"mask": np.ones(7, bool)}, "x_mask"),
        ({"axis_name": "rows"}, "enclosing shard_map, got 'rows'"),
        ({"axis_name": "rows", "devices": 2}, "mesh's axes"),
        ({"devices": 3}, "share evenly"),
    ],
)
def test_bad_input_is_a_one_line_error(change, message):
    devices = change.pop("devices", None)
    args = {"image": np.ones((8, 3), np.float32), "text": np.ones((8, 3), np.float32), "logit_scale": 1.0} | change
    with pytest.raises(ValueError, match=message) as error:
        clip_loss(**args, mesh=oracle.mesh_of(devices) if devices else None)
    assert "\n" not in str(error.value)
