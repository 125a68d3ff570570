"""Schedules and layer-wise factors, against those of OpenCLIP, timm and big_vision."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from infcl_jax.models import model_config
from infcl_jax.models.registry import build_model
from infcl_jax.training import (
    OptimizerConfig,
    UnlockedGroups,
    check_optimizer,
    frozen_parameters,
    learning_rate_schedule,
    make_optimizer,
)
from infcl_jax.training.frozen import partition
from infcl_jax.training.optimizer_config import SCHEDULES, layer_decay_factors, parameter_names

with np.load(Path(__file__).parents[1] / "golden" / "schedules.npz") as file:
    GOLDEN = dict(file)
CASES = json.loads(str(GOLDEN["settings"]))
PEAK = 1e-3


def rates(total, **settings):
    """The learning rates of all steps and of the one after the last."""
    schedule = jax.jit(learning_rate_schedule(OptimizerConfig(learning_rate=PEAK, **settings), total))
    return np.asarray([schedule(step) for step in range(total + 1)])


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]["config"]))
def test_every_step_is_that_of_other_libraries(number):
    config, total = CASES[number]["config"], CASES[number]["total_steps"]
    schedule = jax.vmap(learning_rate_schedule(OptimizerConfig(**config), total))
    np.testing.assert_allclose(schedule(jnp.arange(total)), GOLDEN[f"rates_{number}"], rtol=1e-6)


@pytest.mark.parametrize(("final", "schedule"), [*zip((0.0, 1e-5, 0.0, 1e-5), SCHEDULES, strict=True)])
@pytest.mark.parametrize(("warmup", "cooldown", "total"), [(0, 0, 1), (9, 0, 10), (0, 10, 10), (3, 4, 10)])
def test_schedules_warm_up_and_end_at_the_final_rate(schedule, warmup, cooldown, total, final):
    settings = {"schedule": schedule, "warmup_steps": warmup, "cooldown_steps": cooldown, "rsqrt_timescale": 2.0}
    got = rates(total, final_learning_rate=final, **settings)
    np.testing.assert_allclose(got[: warmup + 1], PEAK * np.arange(warmup + 1) / warmup if warmup else PEAK, rtol=1e-6)
    assert all(np.diff(got[warmup:]) <= 0)
    end = {"constant": PEAK, "rsqrt": PEAK / math.sqrt(1 + (total - warmup) / 2)}.get(schedule, final)
    np.testing.assert_allclose(got[-1], final if cooldown else end, rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_stays_constant_after_the_last_step(schedule):
    after = learning_rate_schedule(OptimizerConfig(schedule=schedule, cooldown_steps=2), 10)
    assert float(after(10)) == float(after(1000))


@pytest.mark.parametrize(
    ("warmup", "cooldown", "message"),
    [
        (10, 0, "optimizer.warmup_steps < total_steps, got 10 and 10"),
        (4, 7, r"optimizer.warmup_steps \+ optimizer.cooldown_steps <= total_steps, got 4 \+ 7 and 10"),
    ],
)
def test_a_warmup_and_cooldown_longer_than_the_run_are_refused(warmup, cooldown, message):
    with pytest.raises(ValueError, match=f"^expected {message}; shorten [^\n]*$"):
        make_optimizer(OptimizerConfig(warmup_steps=warmup, cooldown_steps=cooldown), 10)


def parameters(name="tiny", **changes):
    config = model_config(name, **changes)
    shape = (1, config.vision.image_size, config.vision.image_size, 3)
    tokens = jnp.zeros((1, config.text.context_length), jnp.int32)
    init = build_model(config).init
    return jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros(shape, jnp.uint8), tokens))["params"]


def factors_by_name(decays, params):
    names = jax.tree.leaves(parameter_names(params))
    return dict(zip(names, jax.tree.leaves(layer_decay_factors(decays, params)), strict=True))


# Names in timm's Vision Transformer and here.
OURS = {
    "cls_token": "class_embedding",
    "pos_embed": "positional_embedding",
    "patch_embed.proj": "conv1",
    "norm_pre": "ln_pre",
    "blocks.": "transformer/block_0",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attn.qkv": "attn/in_proj",
    "attn.proj": "attn/out_proj",
    "mlp.fc1": "mlp/c_fc",
    "mlp.fc2": "mlp/c_proj",
    "norm.": "ln_post/",
    "head.": "proj/",
}


def ours(name):
    """Translate the name of a parameter of timm's Vision Transformer, without weight or bias."""
    name = name.removesuffix("weight").removesuffix("bias")
    for theirs, here in OURS.items():
        name = name.replace(theirs, here)
    return f"visual/{name.replace('.', '/')}"


def test_layer_decay_is_that_of_timm():
    decay, expected = float(GOLDEN["layer_decay"]), json.loads(str(GOLDEN["layer_factors"]))
    got = factors_by_name((decay, 1.0), parameters(**{"vision.layers": 3}))
    theirs = {ours(name): factor for name, factor in expected.items() if not name.startswith("patch_embed.proj.bias")}
    for prefix, factor in theirs.items():
        matches = [got[name] for name in got if name.startswith(prefix)]
        assert matches == pytest.approx([factor] * len(matches)) and matches, prefix
    rest = {name: factor for name, factor in got.items() if not name.startswith(tuple(theirs))}
    assert rest and set(rest.values()) == {1.0} and not any(name.startswith("visual/") for name in rest)


@pytest.mark.parametrize(
    ("name", "exponents"),
    [
        ("token_embedding", 3),
        ("positional_embedding", 3),
        ("transformer/block_00/mlp/c_fc/kernel", 2),
        ("transformer/block_01/ln_1/scale", 1),
        ("ln_final/scale", 1),
        ("text_projection/kernel", 0),
    ],
)
def test_text_towers_decay_by_their_own_factor(name, exponents):
    got = factors_by_name((0.5, 0.8), parameters(**{"text.layers": 2}))
    assert got[f"text/{name}"] == pytest.approx(0.8**exponents)
    assert got["logit_scale"] == got["visual/proj/kernel"] == 1.0


def test_bottlenecks_are_the_layers_of_a_resnet():
    got = factors_by_name((0.5, 1.0), parameters("RN50"))
    layers = 3 + 4 + 6 + 3
    for name, layer in {"conv1": 0, "bn3": 0, "layer1_0": 1, "layer2_0": 4, "layer4_2": layers, "attnpool": 17}.items():
        assert {got[path] for path in got if path.startswith(f"visual/{name}/")} == {0.5 ** (layers + 1 - layer)}


def test_lower_layers_may_be_frozen():
    params = parameters(**{"vision.layers": 3, "text.layers": 2})
    top = {name: params["visual"][name] for name in ("ln_post", "proj")}
    top["transformer"] = {"block_02": params["visual"]["transformer"]["block_02"]}
    got, whole = (factors_by_name((0.5, 0.5), p) for p in ({"visual": top}, params))
    assert got == {name: whole[name] for name in got}


def test_layer_decay_scales_the_updates_beside_the_rules():
    params = {
        "visual": {"transformer": {"block_00": {"bias": jnp.ones(2)}}, "proj": {"bias": jnp.ones(2)}},
        "logit_scale": jnp.ones(()),
    }
    rules = (("visual/proj/.*", 0.1), (".*", 1.0))
    config = OptimizerConfig(name="sgd", learning_rate_rules=rules, layer_decay=(0.5, 0.5), weight_decay=0.0)
    optimizer = make_optimizer(config, 10)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    got = jax.tree.map(lambda update: float(update.max()), updates)
    expected = {
        "visual": {"transformer": {"block_00": {"bias": -0.5e-3}}, "proj": {"bias": -0.1e-3}},
        "logit_scale": -1e-3,
    }
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


@pytest.mark.parametrize("unlocked", [0, 2])
def test_rates_of_locked_parameters_may_be_given(unlocked):
    """The trained parameters have the rates that they have in an unlocked model."""
    params = parameters(**{"vision.layers": 3})
    trained, _ = partition(params, frozen_parameters(params, ("image",), UnlockedGroups(image=unlocked)))
    rules = (("visual/conv1/.*", 0.1), (".*", 1.0))
    config = OptimizerConfig(name="sgd", learning_rate_rules=rules, layer_decay=(0.5, 0.9), weight_decay=0.0)
    check_optimizer(config, params)

    def updates(shapes):
        ones = jax.tree.map(lambda shape: jnp.ones(shape.shape), shapes)
        optimizer = make_optimizer(config, 10)
        return flatten_dict(optimizer.update(ones, optimizer.init(ones), ones)[0])

    got, whole = updates(trained), updates(params)
    assert got.keys() < whole.keys()
    for name, update in got.items():
        np.testing.assert_array_equal(update, whole[name], err_msg=str(name))


def test_a_tower_without_layers_cannot_decay():
    tower = {"visual": {"kernel": jnp.ones(2)}, "logit_scale": jnp.ones(())}
    with pytest.raises(ValueError, match=r"^expected layers in the image tower with optimizer.layer_decay=0.5, got n"):
        check_optimizer(OptimizerConfig(layer_decay=(0.5, 1.0)), tower)


@pytest.mark.parametrize("decays", [(0.0, 1.0), (1.0, 1.1), (0.5,), (math.nan, 1.0)])
def test_layer_decays_out_of_range_are_refused(decays):
    with pytest.raises(ValueError, match=r"^expected .*optimizer.layer_decay (in \(0, 1\]|to be two numbers), got"):
        OptimizerConfig(layer_decay=decays)
