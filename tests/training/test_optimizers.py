"""What decays, rates by parameter, and every optimizer against its equations in fp64."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.traverse_util import flatten_dict

from infcl_jax.training import OptimizerConfig, check_optimizer, learning_rate_schedule, make_optimizer
from infcl_jax.training.optimizer_config import OPTIMIZERS
from infcl_jax.training.optimizers import decay_factors


def test_what_decays_of_a_clip_model():
    shapes = jax.eval_shape(
        lambda: runs.model(init_logit_bias=-10.0).init(jax.random.key(0), **jax.tree.map(jnp.asarray, runs.batch(1)))
    )
    factors = decay_factors(OptimizerConfig(), shapes["params"])
    names = flatten_dict(factors, sep="/")
    kept = ("bias", "scale", "class_embedding", "logit_scale", "logit_bias")
    assert names == {name: not name.endswith(kept) for name in names}
    assert {"logit_scale", "logit_bias"} < set(names)
    assert 0.0 < sum(names.values()) < len(names)


TOTAL = 10


def direction(config, memory, t, g, p):
    """Update of step t by the optimizer's paper in fp64, without decay and rate.

    Updates `memory`.
    """
    first, second = memory.get("first", np.zeros_like(g)), memory.get("second", np.zeros_like(g))
    beta1, beta2 = config.beta1, config.beta2
    if config.name in ("adamw", "lamb"):
        memory["first"], memory["second"] = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g**2
        root = np.sqrt(memory["second"] / (1 - beta2**t))
        return memory["first"] / (1 - beta1**t) / (root + config.eps)
    if config.name == "lion":
        memory["first"] = beta2 * first + (1 - beta2) * g
        return np.sign(beta1 * first + (1 - beta1) * g)
    if config.name == "sgd":
        memory["first"] = beta1 * first + g
        return memory["first"]
    decay = min(1 - t**-0.8, beta2)
    memory["second"] = decay * second + (1 - decay) * (g**2 + 1e-30)
    mean = memory["second"]
    if g.ndim == 2 and min(g.shape) >= 32:
        mean = mean.mean(1, keepdims=True) * mean.mean(0, keepdims=True) / mean.mean()
    scaled = g / np.sqrt(mean)
    update = beta1 * first + (1 - beta1) * scaled / max(1.0, np.sqrt((scaled**2).mean()))
    memory["first"] = update.astype(jnp.bfloat16).astype(np.float64)
    return update


def by_equations(config, params, gradients):
    """The parameters after all steps, in fp64."""
    params = {name: value.astype(np.float64) for name, value in params.items()}
    memory = {name: {} for name in params}
    for t, gradient in enumerate(gradients, start=1):
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values()))
        shrink = 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / norm)
        rate = float(learning_rate_schedule(config, TOTAL)(t - 1))
        for name, value in params.items():
            update = direction(config, memory[name], t, shrink * gradient[name].astype(np.float64), value)
            update = update + (config.weight_decay * value if value.ndim >= 2 else 0.0)
            if config.name == "lamb" and value.ndim >= 2 and config.weight_decay:
                update = update * np.linalg.norm(value) / np.linalg.norm(update)
            params[name] = value - rate * update
    return params


def after(optimizer, params, gradients):
    got, state = jax.tree.map(jnp.asarray, params), optimizer.init(params)
    for gradient in gradients:
        with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
            updates, state = optimizer.update(gradient, state, got)
        got = jax.tree.map(jnp.add, got, updates)
    return got, state


def problem(seed=0):
    """Parameters, and gradients of ten steps of all magnitudes."""
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (5, 3), "large": (32, 40), "bias": (3,), "logit_scale": ()}
    params = {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes.items()}

    def gradient():
        magnitude = 10.0 ** rng.integers(-3, 2)
        return {name: np.asarray(magnitude * rng.normal(size=p.shape), np.float32) for name, p in params.items()}

    return params, [gradient() for _ in range(TOTAL)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 2},
        {"beta1": 0.8, "beta2": 0.5, "eps": 1e-2, "final_learning_rate": 1e-3},
        {"weight_decay": 0.0, "schedule": "constant"},
        {"clip_norm": 0.5},
        {"clip_norm": 1e6},
    ],
    ids=str,
)
def test_ten_steps_are_those_of_the_equations(name, settings):
    config = OptimizerConfig(**({"name": name, "learning_rate": 1e-2} | settings))
    params, gradients = problem()
    got, _ = after(make_optimizer(config, TOTAL), params, gradients)
    for name, expected in by_equations(config, params, gradients).items():
        change = expected - params[name]
        # A mean kept in bf16 that is rounded the other way differs by 2^-8 of it.
        slack = 2e-4 * np.abs(change).max() if config.name == "adafactor" else 5e-7
        np.testing.assert_allclose(got[name] - params[name], change, rtol=2e-5, atol=max(slack, 1e-6))


@pytest.mark.parametrize("name", ["lamb", "lion"])
def test_where_optax_has_no_exceptions_it_gives_the_same(name):
    params, gradients = problem()
    vectors = [{name: g[name] for name in ("matrix", "large", "bias")} for g in (params, *gradients)]
    config = OptimizerConfig(name=name, weight_decay_rules=((".*", 1.0),), schedule="constant")
    make = {"lamb": functools.partial(optax.lamb, eps=config.eps), "lion": optax.lion}[name]
    theirs = make(config.learning_rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay)
    for got, expected in zip(
        *(after(tx, vectors[0], vectors[1:])[0].values() for tx in (make_optimizer(config, TOTAL), theirs)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_momentum_of_adafactor_stays_bf16():
    _, state = after(make_optimizer(OptimizerConfig(name="adafactor"), TOTAL), *problem())
    sizes = {leaf.dtype.name: leaf.size for leaf in jax.tree.leaves(state) if leaf.size >= 32 * 40}
    assert sizes == {"bfloat16": 32 * 40}  # and no second moment of the matrix's size


def test_lamb_is_that_of_timm():
    """Twenty steps with a zero bias, a gain and a logit scale (golden/make_lamb.py)."""
    with np.load(Path(__file__).parents[1] / "golden" / "lamb.npz") as file:
        golden = dict(file)
    start, gradients, expected = (
        {name.partition("/")[2]: value for name, value in golden.items() if name.startswith(f"{part}/")}
        for part in ("start", "gradients", "after")
    )
    config = OptimizerConfig(name="lamb", learning_rate=1e-2, schedule="constant", weight_decay=0.1)
    steps = [{name: value[step] for name, value in gradients.items()} for step in range(20)]
    got, _ = after(make_optimizer(config, 20), start, steps)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name] - start[name], value - start[name], rtol=2e-5, atol=1e-6, err_msg=name)


def test_rates_and_decay_by_the_names_of_parameters():
    params, gradients = problem()
    rules = {"learning_rate_rules": (("b.*", 0.5), ("large", 0.0), (".*", 1.0)), "weight_decay_rules": ((".*", 0.0),)}
    changes = [
        {name: got - params[name] for name, got in after(make_optimizer(config, TOTAL), params, gradients)[0].items()}
        for config in (OptimizerConfig(weight_decay=0.0), OptimizerConfig(**rules))
    ]
    for name, factor in {"matrix": 1.0, "bias": 0.5, "large": 0.0}.items():
        np.testing.assert_allclose(changes[1][name], factor * changes[0][name], rtol=1e-4, atol=1e-7)


def test_rules_that_do_not_fit_the_parameters_are_refused():
    params = problem()[0]
    config = OptimizerConfig(learning_rate_rules=(("matrix", 1.0),))
    with pytest.raises(ValueError, match=r"optimizer.learning_rate_rules .* got none for bias; end with"):
        make_optimizer(config, TOTAL).init(params)
    config = OptimizerConfig(weight_decay_rules=(("matrix", 1.0), ("visual/.*", 2.0), (".*", 1.0)))
    with pytest.raises(ValueError, match=r"optimizer.weight_decay_rules .* got 'visual/\.\*', which matches none"):
        check_optimizer(config, params)


@pytest.mark.parametrize(("schedule", "rates"), [("constant", (1, 1)), ("cosine", (1, 0.5)), ("threshold", (1 / 3, 1))])
def test_the_temperature_has_a_rate_of_its_own(schedule, rates):
    """Gradient descent from a temperature below 0.03, which the first step leaves."""
    config = OptimizerConfig(
        name="sgd", beta1=0.0, warmup_steps=5, temperature_learning_rate=0.3, temperature_schedule=schedule
    )
    optimizer = make_optimizer(config, TOTAL)
    params = {"logit_scale": jnp.float32(math.log(1 / 0.0299)), "bias": jnp.ones(3)}
    got, state = after(optimizer, params, [{"logit_scale": jnp.float32(1.0), "bias": jnp.ones(3)}])
    np.testing.assert_allclose(params["logit_scale"] - got["logit_scale"], 0.3 * rates[0], rtol=1e-5)
    np.testing.assert_array_equal(got["bias"], params["bias"])  # in its warm-up
    state = jax.tree.map(lambda leaf: jnp.full_like(leaf, TOTAL // 2), state)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update({"logit_scale": jnp.float32(1.0), "bias": jnp.ones(3)}, state, got)
    np.testing.assert_allclose(updates["logit_scale"], -0.3 * rates[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("learning_rate", (0.0, -1e-3, math.nan)),
        ("cooldown_steps", (-1,)),
        ("beta1", (-0.1, 1.0, math.nan)),
        ("schedule", ("step",)),
    ],
)
def test_a_value_out_of_range_is_named_with_its_field(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^expected [^\n]*optimizer\.{field} [^\n]*got '?{value}'?$"):
            OptimizerConfig(**{field: value})


@pytest.mark.parametrize("rule", [("(", 1.0), ("a", -1.0), ("a", "b"), ("a",), 3])
def test_a_rule_that_is_none_is_refused(rule):
    with pytest.raises(ValueError, match=r"expected optimizer.weight_decay_rules to be .*pairs"):
        OptimizerConfig(weight_decay_rules=(rule,))
