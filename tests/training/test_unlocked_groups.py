"""Partly frozen towers: OpenCLIP's groups; frozen modules in inference mode, without backward pass."""

import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import optax
import oracle
import pytest
import runs
from flax.traverse_util import flatten_dict

from infcl_jax.models import TOWERS, build_model, model_config
from infcl_jax.planner import Workload, plan_memory, tree_bytes
from infcl_jax.planner.activations import parameter_shapes
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.training import (
    GradCacheConfig,
    UnlockedGroups,
    create_state,
    frozen_parameters,
    make_loss,
    make_train_step,
    parameter_groups,
)
from infcl_jax.training.frozen import partition

BATCH, DEVICES = 8, 2
NO_CACHE, CHUNKS, HOST = {}, {"chunk_size": 4, "keep": 1}, {"chunk_size": 4, "keep": 1, "offload": "host"}
GROUPS = json.loads((Path(__file__).parents[1] / "golden" / "locked_groups.json").read_text())
RESNET = {
    "vision.width": 4,
    "vision.heads": 4,
    "vision.layers": (1, 1, 1, 1),
    "vision.image_size": 32,
    "embed_dim": 8,
    "text.width": 16,
    "text.heads": 2,
    "text.layers": 1,
    "text.context_length": runs.CONTEXT,
    "text.vocab_size": 259,
}
RESNET_GROUPS = ("(conv|bn)[123]/", "layer1_0/", "layer2_0/", "layer3_0/", "layer4_0/", "attnpool/")
SGD = optax.sgd(0.1)  # updates are proportional to gradients


@pytest.fixture(scope="module", autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


@functools.cache
def transformers(layers=3):
    return runs.model(**{"vision.layers": layers, "text.layers": layers})


@functools.cache
def resnet():
    return build_model(model_config("RN50", **RESNET))


def locked(model, frozen, optimizer=SGD, **unlocked):
    return create_state(
        model,
        optimizer,
        model.visual.image_size,
        runs.CONTEXT,
        0,
        oracle.mesh_of(DEVICES),
        frozen=frozen,
        unlocked_groups=UnlockedGroups(**unlocked),
    )


def images(size):
    batch = runs.batch(BATCH)
    return batch | {"image": np.random.default_rng(0).integers(0, 256, (BATCH, size, size, 3), dtype=np.uint8)}


@functools.cache
def stepper(**cache):
    mesh = oracle.mesh_of(DEVICES)
    return make_train_step(make_loss("clip", mesh), 0, GradCacheConfig(**cache), mesh)


def train(state, batch, **cache):
    """The state after a step, and its metrics, on the host."""
    batch = batch if cache.get("offload") == "host" else shard_batch(oracle.mesh_of(DEVICES), batch)
    return jax.device_get(stepper(**cache)(state, batch))


def loss_in_inference(model, variables, batch):
    """The loss of a batch without dropout, with the stored batch statistics."""
    loss = make_loss("clip", None)
    return jax.jit(lambda *args: loss(model.apply(*args)).value)(variables, batch["image"], batch["text"])


@functools.cache
def trained_whole():
    """A step of a model without frozen parameters, and its metrics."""
    return train(locked(transformers(2), ()), runs.batch(BATCH))


def flat(tree):
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(jax.device_get(tree), sep="/").items()}


@pytest.mark.parametrize(("tower", "groups"), [(tower, n) for tower in TOWERS for n in range(7)])
def test_unlocked_groups_are_those_of_open_clip(tower, groups):
    params = parameter_shapes(transformers())
    trained, _ = partition(params, frozen_parameters(params, (tower,), UnlockedGroups(**{tower: groups})))
    names = sorted(name for name in flatten_dict(trained, sep="/") if name.startswith(f"{TOWERS[tower]}/"))
    assert names == GROUPS[TOWERS[tower]][groups]


def test_groups_of_a_resnet_are_its_stages():
    groups = parameter_groups(parameter_shapes(resnet())["visual"])
    for names, prefix in zip(groups, RESNET_GROUPS, strict=True):
        assert names and all(re.match(prefix, name) for name in names)


@pytest.mark.parametrize("cache", [NO_CACHE, HOST], ids=str)
def test_a_partly_locked_tower_is_trained_as_a_whole_one(cache):
    """With plain gradient descent, trained parameters move as if nothing were frozen."""
    model, batch = transformers(2), runs.batch(BATCH)
    state = locked(model, ("image", "text"), image=2, text=1)
    before, trained = flat(state.params), set(flat(state.trained))
    after, metrics = train(state, batch, **cache)
    whole, whole_metrics = trained_whole()
    np.testing.assert_allclose(metrics["loss"], whole_metrics["loss"], rtol=1e-6)
    assert metrics["grad_norm"] < whole_metrics["grad_norm"]
    for name, value in flat(after.params).items():
        if name in trained:
            np.testing.assert_allclose(value, flat(whole.params)[name], rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(value, before[name])
    moved = {name for name, value in flat(after.params).items() if (value != before[name]).any()}
    assert moved <= trained and len(moved) > 10


@pytest.mark.parametrize(("cache", "passes"), [(NO_CACHE, 1), ({"chunk_size": 4}, 2)], ids=str)
def test_a_locked_block_has_no_backward_pass(cache, passes):
    """It adds the GEMMs of its forward pass alone, once for each encoding pass; a frozen tower has one pass."""
    batch = runs.batch(BATCH)

    def products(layers, **unlocked):
        state = jax.eval_shape(lambda: locked(runs.model(**{"vision.layers": layers}), ("image",), **unlocked))
        return stepper(**cache).lower(state, batch).as_text().count("dot_general")

    def encoder_products(layers):
        model = runs.model(**{"vision.layers": layers})
        variables = jax.eval_shape(model.init, jax.random.key(0), batch["image"], batch["text"])
        encode = jax.jit(functools.partial(model.apply, method="encode_image"))
        return encode.lower(variables, batch["image"]).as_text().count("dot_general")

    forward = encoder_products(3) - encoder_products(2)
    assert products(3) - products(2) == forward > 0
    assert products(3, image=1) - products(2, image=1) == passes * forward


@pytest.mark.parametrize(
    ("cache", "unlocked"), [(NO_CACHE, 2), pytest.param(CHUNKS, 0, marks=pytest.mark.full), (HOST, 1)], ids=str
)
def test_locked_batch_normalization_keeps_its_statistics(cache, unlocked):
    model = resnet()
    state, batch = locked(model, ("image",), image=unlocked), images(32)
    variables = jax.device_get(state.variables)
    after, metrics = train(state, batch, **cache)
    before, statistics = flat(variables["batch_stats"]), flat(after.batch_stats)
    moved = {name for name in before if (statistics[name] != before[name]).any()}
    assert moved == {name for name in before if unlocked == 2 and "layer4_0" in name}
    if unlocked < 2:  # no module uses batch statistics
        expected = loss_in_inference(model, variables, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


@pytest.mark.parametrize("cache", [NO_CACHE, CHUNKS], ids=str)
def test_frozen_towers_are_without_dropout(cache):
    model = runs.model(**{"vision.dropout": 0.5, "text.dropout": 0.5, "vision.patch_dropout": 0.5})
    state, batch = locked(model, ("image", "text")), runs.batch(BATCH)
    expected = loss_in_inference(model, jax.device_get(state.variables), batch)
    _, metrics = train(state, batch, **cache)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    _, unlocked = train(locked(model, ("image", "text"), image=2), batch, **cache)  # the last block has dropout
    assert abs(unlocked["loss"] - expected) > 1e-4


def test_the_optimizer_state_and_the_plan_leave_out_what_is_locked():
    def plan(**unlocked):
        frozen = ("image",) if unlocked else ()
        settings = {"frozen": frozen, "unlocked_groups": UnlockedGroups(**unlocked)}
        return plan_memory(Workload(model=transformers(), optimizer=runs.ADAM, batch_size=64, **settings))

    state = jax.eval_shape(lambda: locked(transformers(), ("image",), runs.ADAM, image=2))
    part, whole = plan(image=2), plan()
    assert jax.tree.structure(state.opt_state[0].mu) == jax.tree.structure(state.trained)
    assert part.optimizer == tree_bytes(state.opt_state)
    assert part.gradients == part.updates == tree_bytes(state.trained)
    assert plan(image=0).stored < part.stored < plan(image=4).stored < whole.stored


@pytest.mark.parametrize(
    ("unlocked", "message"),
    [
        ({"image": -1}, "expected unlocked_groups.image >= 0, got -1"),
        ({"frozen": ("visual",)}, r"expected frozen to be one of \('image', 'text'\), got 'visual'"),
        ({"text": 2}, r"expected 'text' in frozen with unlocked_groups.text=2, got \('image',\)"),
    ],
)
def test_bad_unlocked_groups_are_refused(unlocked, message):
    with pytest.raises(ValueError, match=message):
        locked(transformers(), **({"frozen": ("image",)} | unlocked))
