"""The schedule's values, what decays, and AdamW against its equations in fp64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from infcl_jax.training import OptimizerConfig, learning_rate_schedule, make_optimizer
from infcl_jax.training.optimizers import decay_mask


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 10), (4, 10), (9, 10)])
@pytest.mark.parametrize(("peak", "final"), [(1e-3, 0.0), (2e-3, 5e-4)])
def test_schedule_rises_in_a_line_and_falls_in_a_cosine(warmup, total, peak, final):
    config = OptimizerConfig(learning_rate=peak, warmup_steps=warmup, final_learning_rate=final)
    schedule = learning_rate_schedule(config, total)
    rising = [peak * step / warmup for step in range(warmup)]
    phase = np.pi * np.arange(total - warmup + 1) / (total - warmup)
    falling = final + (peak - final) * (1 + np.cos(phase)) / 2
    got = [float(schedule(step)) for step in range(total + 1)]
    np.testing.assert_allclose(got, [*rising, *falling], rtol=1e-6, atol=1e-6 * peak)


@pytest.mark.parametrize("warmup", [10, 11])
def test_a_warmup_as_long_as_the_run_is_refused(warmup):
    with pytest.raises(ValueError, match=f"optimizer.warmup_steps < total_steps, got {warmup} and 10"):
        make_optimizer(OptimizerConfig(warmup_steps=warmup), 10)


def test_what_decays_of_a_clip_model():
    shapes = jax.eval_shape(
        lambda: runs.model(init_logit_bias=-10.0).init(jax.random.key(0), **jax.tree.map(jnp.asarray, runs.batch(1)))
    )
    mask = jax.tree_util.tree_flatten_with_path(decay_mask(shapes["params"]))[0]
    names = {"/".join(key.key for key in path): decays for path, decays in mask}
    kept = ("bias", "scale", "class_embedding", "logit_scale", "logit_bias")
    assert names == {name: not name.endswith(kept) for name in names}
    assert {"logit_scale", "logit_bias"} < set(names)
    assert 0 < sum(names.values()) < len(names)


def adamw(config, total, params, gradients):
    """Algorithm 2 of Loshchilov & Hutter (2019) after clipping by the global norm, in fp64."""
    params = {name: value.astype(np.float64) for name, value in params.items()}
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for t, gradient in enumerate(gradients, start=1):
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values()))
        shrink = 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / norm)
        rate = float(learning_rate_schedule(config, total)(t - 1))
        for name, value in params.items():
            g = shrink * gradient[name].astype(np.float64)
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * g
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * g**2
            moment, square = first[name] / (1 - config.beta1**t), second[name] / (1 - config.beta2**t)
            decay = config.weight_decay * value if value.ndim >= 2 else 0.0
            params[name] = value - rate * (moment / (np.sqrt(square) + config.eps) + decay)
    return params


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 2},
        {"beta1": 0.8, "beta2": 0.95, "eps": 1e-2, "final_learning_rate": 1e-3},
        {"weight_decay": 0.0},
        {"clip_norm": 0.5},
        {"clip_norm": 1e6},
    ],
    ids=str,
)
def test_adamw_equals_its_equations(settings):
    config, total = OptimizerConfig(**({"learning_rate": 1e-2} | settings)), 6
    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(5, 3)), "bias": rng.normal(size=3), "scale": rng.normal(size=())}
    params = {name: np.asarray(value, np.float32) for name, value in params.items()}

    def gradient():
        magnitude = 10.0 ** rng.integers(-3, 2)
        return {name: np.asarray(magnitude * rng.normal(size=p.shape), np.float32) for name, p in params.items()}

    gradients = [gradient() for _ in range(total)]
    optimizer = make_optimizer(config, total)
    got, state = jax.tree.map(jnp.asarray, params), optimizer.init(params)
    for gradient in gradients:
        with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
            updates, state = optimizer.update(gradient, state, got)
        got = jax.tree.map(jnp.add, got, updates)
    for name, expected in adamw(config, total, params, gradients).items():
        np.testing.assert_allclose(got[name] - params[name], expected - params[name], rtol=2e-5, atol=5e-7)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("learning_rate", (0.0, -1e-3, math.nan)),
        ("warmup_steps", (-1,)),
        ("final_learning_rate", (-1e-9, math.nan)),
        ("weight_decay", (-0.1, math.nan)),
        ("beta1", (-0.1, 1.0, math.nan)),
        ("beta2", (-0.1, 1.0)),
        ("eps", (0.0, -1e-6)),
        ("clip_norm", (0.0, -1.0, math.nan)),
    ],
)
def test_a_value_out_of_range_is_named_with_its_field(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^expected [^\n]*optimizer\.{field} [^\n]*got {value}$"):
            OptimizerConfig(**{field: value})
