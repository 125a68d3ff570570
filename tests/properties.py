"""Checks of losses and `pairwise_lse` with every gradient on random inputs.

The oracle is NumPy in float64. Every comparison uses a forward error bound: a few fp32 roundings of the sum of the
absolute values of what is added up. Masked rows hold junk.
"""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_global
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from infcl_jax import clip_loss, create_samples, global_contrastive_loss, pairwise_lse, retrieval_loss, siglip_loss

ROWS = {1: 23, 4: 20, 8: 24}  # global batch by number of devices: strips and blocks of odd sizes
DIM, EACH = 16, 2  # features; passages of each query
EPS = float(jnp.finfo(jnp.float32).eps)
LOGIT_ROUNDINGS, SUM_ROUNDINGS = 8, 40  # of logits relative to the scale; of sums of up to 48 equal terms
LEAST_ERROR = 0.0  # allowed whatever the scale, where features or dS are split into bf16 terms
JUNK = (0.0, np.nan, np.inf, -np.inf, 3e38)
SAMPLES = 40


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Recipe for features: cones, aligned pairs, duplicates and opposite rows in any mix.

    Attributes:
      seed: of the normal samples.
      spread: width of a cone around (1, ..., 1) that holds all features; None: no cone.
      noise: distance of each column from its row; None: independent.
      periods: of repeated rows and columns; None: all different.
      opposite: rows and columns opposite to the others.
    """

    seed: int
    spread: float | None
    noise: float | None
    periods: tuple[int | None, int | None]
    opposite: tuple[tuple[int, ...], tuple[int, ...]]

    def features(self, bx, by=None):
        """Unit fp32 features `[bx, DIM]`, `[by, DIM]`."""
        by = by or bx
        rng = np.random.default_rng(self.seed)
        x, y = rng.normal(size=(bx, DIM)), rng.normal(size=(by, DIM))
        if self.spread is not None:
            x, y = 1 + self.spread * x, 1 + self.spread * y
        if self.noise is not None:
            x[:by] = oracle.unit(y[:bx]) + self.noise * rng.normal(size=(min(bx, by), DIM))
        for side, period, opposite in zip((x, y), self.periods, self.opposite, strict=True):
            side[:] = side[np.arange(len(side)) % (period or len(side))]
            side[[row % len(side) for row in opposite]] = -side.mean(0)
        return oracle.unit(x).astype(np.float32), oracle.unit(y).astype(np.float32)


few_rows = st.lists(st.integers(0, 47), max_size=3).map(tuple)
geometries = st.builds(
    Geometry,
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from((None, 0.01, 0.3, 0.8)),
    noise=st.sampled_from((None, 0.0, 1e-3, 0.3)),
    periods=st.tuples(*[st.sampled_from((None, None, 1, 3))] * 2),
    opposite=st.tuples(few_rows, few_rows),
)


def masks(rows):
    """Bool `[rows]`, at least one of them True."""
    full = st.just(np.ones(rows, bool))
    return full | st.lists(st.booleans(), min_size=rows, max_size=rows).filter(any).map(np.array)


scales = st.sampled_from((1.0, 14.3, 100.0)) | st.floats(0.125, 100.0, width=32)
junk = st.sampled_from(JUNK)


def with_junk(array, mask, value):
    """A copy whose masked rows hold `value`."""
    array = array.copy()
    array[~mask] = value
    return array


def assert_within(got, expected, magnitude, scale):
    """Assert a finite error of a few roundings of `magnitude`.

    `magnitude` is the sum of absolute values, `scale` the largest logit.
    """
    got, expected, magnitude = (np.asarray(a, np.float64) for a in (got, expected, magnitude))
    assert np.isfinite(got).all()
    bound = max(EPS * (SUM_ROUNDINGS + LOGIT_ROUNDINGS * scale), LEAST_ERROR)
    assert np.linalg.norm(got - expected) <= bound * np.linalg.norm(magnitude) + 1e-35


def assert_gradients(got, d_z, x, y, scale, bias=0.0):
    """Assert gradients of features and shared scale.

    `d_z` is dL / d(scale * s) in float64.
    """
    x, y, logits = x.astype(np.float64), y.astype(np.float64), scale + abs(bias)
    size = np.abs(d_z)
    assert_within(got[0], scale * d_z @ y, scale * size @ np.abs(y), logits)
    assert_within(got[1], scale * d_z.T @ x, scale * size.T @ np.abs(x), logits)
    assert_within(got[2], (d_z * (x @ y.T)).sum(), (size * np.abs(x @ y.T)).sum(), logits)


def similarity(x, y):
    return x.astype(np.float64) @ y.astype(np.float64).T


def softmax_terms(z, kept, axis):
    """Log-sum-exp over the kept pairs, and their softmax; zeros where there is none."""
    z = np.where(kept, z, -np.inf)
    top = np.where(kept.any(axis, keepdims=True), z.max(axis, keepdims=True), 0)
    e = np.exp(z - top)
    total = e.sum(axis, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.squeeze(top + np.log(total), axis)
    return lse, e / np.where(total > 0, total, 1)


def contrast(z, kept, positive, axis):
    """Cross entropy along `axis` and its gradient over `z`, without cancellation.

    `positive` `[rows, columns]` marks at most one pair of each row or column.
    """
    negatives, p = softmax_terms(z, kept & ~positive, axis)
    own = np.where(positive, z, 0).sum(axis)
    loss = np.logaddexp(0, negatives - own)
    share = np.expand_dims(np.exp(np.minimum(negatives - own, 0) - np.logaddexp(0, -np.abs(negatives - own))), axis)
    return loss, share * p - np.where(positive, share, 0)


@functools.cache
def clip(implementation, devices):
    mesh = oracle.mesh_of(devices)
    loss = functools.partial(clip_loss, mesh=mesh, implementation=implementation)
    return jax.jit(jax.value_and_grad(lambda *args, mask: loss(*args, mask=mask), argnums=(0, 1, 2)))


def check_clip(data, implementation, devices):
    b = ROWS[devices]
    x, y = data.draw(geometries).features(b)
    scale, mask, value = data.draw(scales), data.draw(masks(b)), data.draw(junk)
    loss, gradients = clip(implementation, devices)(
        with_junk(x, mask, value), with_junk(y, mask, value), jnp.float32(scale), mask=mask
    )
    z, kept, positive = scale * similarity(x, y), np.outer(mask, mask), np.diag(mask)
    rows, d_rows = contrast(z, kept, positive, 1)
    columns, d_columns = contrast(z, kept, positive, 0)
    assert_within(loss, ((rows + columns) / 2)[mask].mean(), ((rows + columns) / 2)[mask].mean(), scale)
    d_z = (np.where(mask[:, None], d_rows, 0) + np.where(mask, d_columns, 0)) / (2 * mask.sum())
    assert_gradients(gradients, d_z, x, y, scale)
    assert not any(np.any(np.asarray(g)[~mask]) for g in gradients[:2])


@functools.cache
def siglip(implementation, devices):
    mesh = oracle.mesh_of(devices)
    loss = functools.partial(siglip_loss, mesh=mesh, implementation=implementation)
    return jax.jit(jax.value_and_grad(lambda *args, mask: loss(*args, mask=mask), argnums=(0, 1, 2, 3)))


def check_siglip(data, implementation, devices):
    b = ROWS[devices]
    x, y = data.draw(geometries).features(b)
    scale, mask, value = data.draw(scales), data.draw(masks(b)), data.draw(junk)
    bias = data.draw(st.sampled_from((0.0, -10.0, -30.0)))
    loss, (*gradients, d_bias) = siglip(implementation, devices)(
        with_junk(x, mask, value), with_junk(y, mask, value), jnp.float32(scale), jnp.float32(bias), mask=mask
    )
    margin = np.where(np.eye(b), 1, -1) * (scale * similarity(x, y) + bias)
    kept = np.outer(mask, mask)
    terms = np.where(kept, np.logaddexp(0, -margin), 0) / mask.sum()
    assert_within(loss, terms.sum(), terms.sum(), scale + abs(bias))
    d_z = np.where(kept, np.where(np.eye(b), -1, 1) * np.exp(-np.logaddexp(0, margin)), 0) / mask.sum()
    assert_gradients(gradients, d_z, x, y, scale, bias)
    assert_within(d_bias, d_z.sum(), np.abs(d_z).sum(), scale + abs(bias))


@functools.cache
def retrieval(implementation, devices):
    mesh = oracle.mesh_of(devices)

    def loss(*args, **options):
        return retrieval_loss(*args, mesh=mesh, implementation=implementation, **options)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def check_retrieval(data, implementation, devices):
    bx, by = ROWS[devices], EACH * ROWS[devices]
    x, y = data.draw(geometries).features(bx, by)
    scale, value = data.draw(scales), data.draw(junk)
    mask, passage_mask = data.draw(masks(bx)), data.draw(masks(by))
    choice = data.draw(st.lists(st.integers(0, EACH - 1), min_size=bx, max_size=bx))
    labels = EACH * np.arange(bx) + np.array(choice)
    given = np.where(mask, labels, data.draw(st.sampled_from((-1, 0, 2**31 - 1)))).astype(np.int32)
    loss, gradients = retrieval(implementation, devices)(
        with_junk(x, mask, value),
        with_junk(y, passage_mask, value),
        jnp.float32(scale),
        labels=given,
        mask=mask,
        passage_mask=passage_mask,
    )
    answered = mask & passage_mask[labels]
    count = max(answered.sum(), 1)
    positive = np.arange(by) == labels[:, None]
    rows, d_rows = contrast(scale * similarity(x, y), np.outer(answered, passage_mask), positive, 1)
    assert_within(loss, rows[answered].sum() / count, rows[answered].sum() / count, scale)
    assert_gradients(gradients, np.where(answered[:, None], d_rows, 0) / count, x, y, scale)


@functools.cache
def primitive(implementation, devices, exclude):
    """Weighted sum of all results with scales, labels and masks, with gradients."""

    def inside(x, y, x_scale, y_scale, labels, x_mask, y_mask, weights):
        found = pairwise_lse(
            x,
            y,
            x_scale,
            y_scale,
            axis_name="data",
            positives="exclude" if exclude else "include",
            labels=labels,
            x_mask=x_mask,
            y_mask=y_mask,
            implementation=implementation,
        )
        found = [jnp.where(jnp.isneginf(a), jnp.zeros_like(a), a) for a in found]
        return jax.lax.psum(sum((a * w).sum() for a, w in zip(found, weights, strict=True)), "data")

    mapped = jax.shard_map(inside, mesh=oracle.mesh_of(devices), in_specs=P("data"), out_specs=P())
    return jax.jit(jax.value_and_grad(mapped, argnums=(0, 1, 2, 3)))


def check_primitive(data, implementation, devices, exclude):
    b = ROWS[devices]
    own = b // devices
    x, y = data.draw(geometries).features(b)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x_mask, y_mask, value = data.draw(masks(b)), data.draw(masks(b)), data.draw(junk)
    scale = data.draw(scales)
    x_scale, y_scale = (rng.uniform(scale / 10, scale, b).astype(np.float32) for _ in range(2))
    local = rng.integers(0, own, b).astype(np.int32)
    labels = local + np.arange(b) // own * own
    weights = [rng.normal(size=b).astype(np.float32) for _ in range(3)]
    weights[2] *= y_mask[labels]  # the similarity with a masked positive is that with its junk
    got_value, got = primitive(implementation, devices, exclude)(
        with_junk(x, x_mask, value),
        with_junk(y, y_mask, value),
        with_junk(x_scale, x_mask, value),
        with_junk(y_scale, y_mask, value),
        np.where(x_mask, local, -1).astype(np.int32),
        x_mask,
        y_mask,
        weights,
    )
    s, positive = similarity(x, y), np.arange(b) == labels[:, None]
    kept = np.outer(x_mask, y_mask) & ~(positive & exclude)
    alpha, beta = x_scale.astype(np.float64)[:, None], y_scale.astype(np.float64)[None, :]
    row, p_row = softmax_terms(alpha * s, kept, 1)
    column, p_column = softmax_terms(beta * s, kept, 0)
    w_row, w_column, w_positive = (w.astype(np.float64) for w in weights)
    row, column = (np.where(np.isneginf(a), 0, a) for a in (row, column))
    terms = [w_row * row * x_mask, w_column * column * y_mask, w_positive * s[np.arange(b), labels] * x_mask]
    assert_within(got_value, np.sum(terms), np.abs(terms).sum(), scale)
    in_rows = np.where(x_mask, w_row, 0)[:, None] * p_row
    in_columns = np.where(y_mask, w_column, 0)[None, :] * p_column
    own_term = np.where(positive, np.where(x_mask, w_positive, 0)[:, None], 0)
    d_s = alpha * in_rows + beta * in_columns + own_term
    size = np.abs(alpha * in_rows) + np.abs(beta * in_columns) + np.abs(own_term)
    assert_within(got[0], d_s @ y, size @ np.abs(y), scale)
    assert_within(got[1], d_s.T @ x, size.T @ np.abs(x), scale)
    assert_within(got[2], (in_rows * s).sum(1), np.abs(in_rows * s).sum(1), scale)
    assert_within(got[3], (in_columns * s).sum(0), np.abs(in_columns * s).sum(0), scale)


@functools.cache
def global_contrastive(variant, implementation, devices):
    mesh = oracle.mesh_of(devices)
    own = oracle_global.LOSSES[variant][0] == "samples"

    def loss(image, text, scale, index, mask):
        state = create_samples(SAMPLES, temperature=0.01 if own else None)
        settings = {"epoch": 1, "temperature_learning_rate": 1e-2} if own else {"logit_scale": scale}
        return global_contrastive_loss(
            *(image, text, index, state),
            **settings,
            variant=variant,
            gamma=0.7,
            rho=6.5,
            mesh=mesh,
            mask=mask,
            implementation=implementation,
        )

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def check_global_contrastive(data, variant, implementation, devices):
    """Temperatures of 0.01 and images that are there twice, masked rows with junk."""
    b = ROWS[devices]
    x, y = data.draw(geometries).features(b)
    mask, value, scale = data.draw(masks(b).filter(lambda m: m.sum() > 1)), data.draw(junk), data.draw(scales)
    index = np.arange(b, dtype=np.int32)
    (loss, _), gradients = global_contrastive(variant, implementation, devices)(
        *(with_junk(x, mask, value), with_junk(y, mask, value)),
        *(jnp.float32(scale), np.where(mask, index, -7).astype(np.int32), mask),
    )
    assert np.isfinite(loss) and all(np.isfinite(g).all() for g in gradients)
    memory = oracle_global.Memory.of(SAMPLES, 0.01)
    constants = {"variant": variant, "mode": "published", "gamma": 0.7, "epoch": 1, "rho": 6.5, "rate": 1e-2}
    with np.errstate(over="ignore"):
        expected, (d_image, d_text, _) = oracle_global.step(
            memory, x[mask], y[mask], index[mask], scale=scale, **constants
        )
    logits = 100.0 if variant == "isogclr" else scale
    assert_within(loss, expected, max(abs(expected), 1), logits)
    largest = max(np.abs(d_image).max(), np.abs(d_text).max())
    for got, want in zip(gradients, (d_image, d_text), strict=False):
        assert_within(np.asarray(got)[mask], want, np.full_like(want, logits / mask.sum() + largest), logits)
        assert not np.any(np.asarray(got)[~mask])


def checks(implementations, devices):
    """`{name: check(data)}` for every loss, implementation and supported number of devices.

    The dense implementations share their code for one device, and no loss but CLIP's adds to the ring of eight.
    """
    everywhere = [(i, n) for i in implementations for n in devices]
    cases = {f"clip-{i}-{n}": functools.partial(check_clip, implementation=i, devices=n) for i, n in everywhere}
    for i, n in everywhere:
        if n == 8:
            continue
        cases[f"retrieval-{i}-{n}"] = functools.partial(check_retrieval, implementation=i, devices=n)
        cases[f"pairwise_lse-{i}-{n}"] = functools.partial(check_primitive, implementation=i, devices=n, exclude=n == 1)
        if n == max(set(devices) - {8}):
            cases[f"isogclr-{i}-{n}"] = functools.partial(
                check_global_contrastive, variant="isogclr", implementation=i, devices=n
            )
    return cases


def sigmoid_checks(implementations, devices):
    """`{name: check(data)}` for the sigmoid loss."""
    return {
        f"siglip-{i}-{n}": functools.partial(check_siglip, implementation=i, devices=n)
        for i in implementations
        for n in devices
    }


def run(check, examples):
    """Run a check on `examples` examples, deterministically, without deadline or database.

    Hypothesis counts compilations between draws as slow draws, so that check of its own is off.
    """
    slow = (hypothesis.HealthCheck.too_slow,)

    @hypothesis.settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=slow
    )
    @hypothesis.given(st.data())
    def example(data):
        check(data)

    example()
