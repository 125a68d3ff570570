"""The memory planner: exact parts, its table and its advice."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import oracle
import pytest
import runs
from absl import flags
from ml_collections import config_flags

from configs import base
from infcl_jax import run
from infcl_jax.models import create_model
from infcl_jax.ops.attention.api import best_attention
from infcl_jax.ops.pairwise.ids import order_bytes
from infcl_jax.planner import (
    DEVICES,
    OutOfMemory,
    TeacherMemory,
    activations,
    describe_plan,
    device_named,
    devices,
    explain_out_of_memory,
    format_plan,
    loss_workspace,
    plan_memory,
    recommended_cache,
)
from infcl_jax.planner.devices import planned_device
from infcl_jax.training import NO_CACHE, GradCacheConfig, create_state, sharding

ADAM = runs.ADAM
MIB = 1 << 20


def parsed(*arguments):
    """`configs/base.py` with changes from the command line."""
    values, argv = flags.FlagValues(), ["program", *arguments]
    config = config_flags.DEFINE_config_dict("config", base.get_config(), flag_values=values, sys_argv=argv)
    values(argv)
    return config.value


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_parameters_and_optimizer_state_are_those_of_a_real_state():
    model = runs.model(param_dtype="bfloat16", init_logit_bias=-10.0)
    with jax.numpy_dtype_promotion("standard"):  # flax multiplies fp32 activations with bf16 parameters
        state = create_state(model, ADAM, runs.SIDE, runs.CONTEXT, 0, oracle.mesh_of(1))
        plan = plan_memory(runs.workload(model=model))
    assert (plan.parameters, plan.optimizer) == (nbytes(state.params), nbytes(state.opt_state))
    assert plan.gradients == sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))


def test_of_a_sharded_state_a_device_holds_its_part_and_for_the_step_all_parameters(monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SIZE", 16)
    state = create_state(runs.model(), ADAM, runs.SIDE, runs.CONTEXT, 0, oracle.mesh_of(4), "fsdp")
    whole, plan = (plan_memory(runs.workload(devices=4, parameter_sharding=kind)) for kind in ("replicated", "fsdp"))
    parts = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, (state.params, state.opt_state))
    assert (plan.parameters, plan.optimizer, plan.updates) == (nbytes(parts[0]), nbytes(parts[1]), nbytes(parts[0]))
    assert plan.gradients == whole.gradients + whole.parameters


@pytest.mark.parametrize("chunk_size", [None, 16])
def test_batch_and_features_are_linear_in_the_batch(chunk_size):
    small, large = (plan_memory(runs.workload(batch_size=b, devices=4, chunk_size=chunk_size)) for b in (64, 256))
    assert small.batch == small.next_batch == nbytes(runs.batch(16))
    assert small.features == 2 * 2 * 16 * runs.MODEL["embed_dim"] * 4
    assert (large.batch, large.features) == (4 * small.batch, 4 * small.features)


@pytest.mark.parametrize("offload", ["host", "replay"])
def test_off_the_devices_three_chunks_are_there(offload):
    plan = plan_memory(runs.workload(batch_size=1024, chunk_size=32, offload=offload))
    assert plan.batch + plan.next_batch == nbytes(runs.batch(96))
    assert plan.gradients > plan_memory(runs.workload(batch_size=1024, chunk_size=32)).gradients


def test_activations_grow_with_the_chunk_and_not_with_the_batch():
    at = {c: plan_memory(runs.workload(batch_size=4096, chunk_size=c)).transient for c in (64, 128, 256)}
    assert at[256] - at[128] == 2 * (at[128] - at[64]) > 0
    assert plan_memory(runs.workload(batch_size=8192, chunk_size=64)).transient == at[64]
    whole = [plan_memory(runs.workload(batch_size=b)).stored for b in (4096, 8192)]
    assert whole[1] == pytest.approx(2 * whole[0], rel=1e-3) and whole[0] > 10 * at[64]


def test_kept_chunks_count_until_all_are_kept():
    plans = [plan_memory(runs.workload(batch_size=256, chunk_size=64, keep=keep)) for keep in range(6)]
    kept = [plan.stored for plan in plans]
    assert kept[0] == 0 and kept[2] == pytest.approx(2 * kept[1], rel=1e-2) and kept[4] == kept[5]
    assert kept[4] == plan_memory(runs.workload(batch_size=256)).stored
    assert plans[4].transient < plans[3].transient == plans[0].transient


def test_every_call_of_a_function_has_arrays_of_its_own():
    def hidden(x, w):
        return jnp.tanh(x @ w)

    def peak(hidden):
        jaxpr = jax.make_jaxpr(lambda x, w: (hidden(x, w) @ w) * (hidden(x, w + 1) @ w))(ones, ones)
        return activations._peak(jaxpr.jaxpr)

    ones = jnp.ones((8, 8))
    assert peak(jax.jit(hidden)) == peak(hidden) > 0


# Of docs/archive/measurements.md: implementation, b, D, devices, MiB.
MEASURED = [
    *(("mosaic_gpu", 65_536, d, 1, mib) for d, mib in ((512, 421), (640, 568), (768, 490), (1024, 517))),
    *(("mosaic_gpu", b, 512, 1, mib) for b, mib in ((2048, 48), (16_384, 338), (131_072, 410), (262_144, 423))),
    *(("mosaic_gpu", b, 768, 8, mib) for b, mib in ((32_768, 84), (65_536, 169), (262_144, 448), (1 << 20, 1447))),
    *(("xla", b, 512, 1, mib) for b, mib in ((2048, 16), (8192, 65), (16_384, 129))),
    *(("dense", b, 512, 1, mib) for b, mib in ((2048, 64), (8192, 512), (16_384, 2048))),
]


@pytest.mark.parametrize(("implementation", "batch", "width", "devices", "mib"), MEASURED)
def test_the_formulas_of_the_loss_meet_the_benchmarks(implementation, batch, width, devices, mib):
    found = loss_workspace(implementation, batch, width, "bfloat16", devices) / MIB
    assert 0.65 < found / mib < 1.15


@pytest.mark.parametrize(("implementation", "sorts"), [("mosaic_gpu", True), ("triton", True), ("xla", False)])
def test_positives_by_id_add_vectors_where_they_are_sorted(implementation, sorts):
    plans = [plan_memory(runs.workload(implementation=implementation, devices=4, by_id=ids)) for ids in (False, True)]
    assert plans[1].loss - plans[0].loss == plans[1].peak - plans[0].peak == (order_bytes(16) if sorts else 0)
    config = runs.config(positives="label", implementation=implementation, batch_size=64)
    assert run.workload(config, 4).by_id and run.workload(config, 4).implementation == implementation


def test_the_devices_at_hand_are_planned_one_by_one(monkeypatch):
    """Several GPUs without a mesh: nobody knows which of them has which rows."""
    gpu = types.SimpleNamespace(device_kind="NVIDIA H200", platform="gpu", core_count=132, compute_capability="9.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu] * 8)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert best_attention((64, 50, 12, 64), "bfloat16") == "cudnn"
    with planned_device():
        assert best_attention((64, 50, 12, 64), "bfloat16") == "mosaic_gpu"


COMPONENTS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "ema": "moving averages",
    "samples": "sample state",
    "teacher": "teacher",
    "gradients": "gradients",
    "updates": "updates",
    "batch": "batch",
    "next_batch": "next batch (prefetched)",
    "features": "features and gradients",
    "stored": "stored activations",
    "transient": "transient activations",
    "loss": "loss workspace",
}


@pytest.mark.parametrize("memory", [None, 1 << 30])
@pytest.mark.parametrize(
    ("changes", "zero"),
    [
        ({}, {"ema", "samples", "teacher", "stored"}),
        ({"ema": True, "sample_bytes": 1, "teacher": TeacherMemory(runs.model()), "keep": 1}, set()),
    ],
)
def test_the_table_has_every_part_aligned(memory, changes, zero):
    plan = plan_memory(runs.workload(chunk_size=32, **changes), memory)
    heading, *lines = format_plan(plan).splitlines()
    cache = "chunk_size 32, keep 1" if "keep" in changes else "chunk_size 32"
    assert heading == f"memory per device: 1 device(s), batch_size 64, {cache}, implementation xla"
    columns = ["component", "MiB", *(["% of limit"] if memory else []), "source"]
    assert re.split("  +", lines[0]) == columns
    labels = [label for name, label in COMPONENTS.items() if name not in zero]
    rows = [re.split("  +", line) for line in lines[1:]]
    assert [row[0] for row in rows] == [*labels, "peak", *(["limit"] if memory else [])]
    assert all(len(row) == len(columns) for row in rows[: len(labels) + 1])
    ends = {line.index(row[1]) + len(row[1]) for line, row in zip(lines[1:], rows, strict=True)}
    assert ends == {lines[0].index("MiB") + 3}
    assert COMPONENTS.keys() == {f.name for f in dataclasses.fields(plan)} - {"workload", "memory_limit"}


@pytest.mark.parametrize(("share", "verdict"), [(0.5, "does not fit"), (1.02, "fits"), (2, "fits")])
def test_recommended_settings_are_flags(share, verdict):
    run = runs.workload(batch_size=4096)
    memory = int(share * plan_memory(run).peak)
    table, _, line = describe_plan(plan_memory(run, memory)).rpartition("\n")
    assert table == format_plan(plan_memory(run, memory)) and line.startswith(f"{verdict}; recommended: ")
    config, cache = parsed(*re.findall("--config[^ ]+", line)), recommended_cache(run, memory)
    assert GradCacheConfig(**config.grad_cache) == cache
    assert ("no change" in line) == (cache == NO_CACHE) == (share == 2)


@pytest.mark.parametrize(("name", "known"), [("H200", "H200-141"), ("rtx 4090", "RTX4090"), ("a100-80", "A100-80")])
def test_devices_are_found_by_name(name, known, monkeypatch):
    assert device_named(name) == DEVICES[known]
    monkeypatch.setattr(devices, "memory_share", lambda: 0.5)
    assert device_named(name).memory_limit == DEVICES[known].memory // 2


@pytest.mark.parametrize("name", ["H999", "A100", ""])
def test_an_unknown_device_is_answered_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"expected a device among .*A100-40.*H200-141.*got"):
        device_named(name)


def test_without_memory_nothing_can_be_said_to_fit():
    with pytest.raises(ValueError, match="expected the memory limit of a device"):
        _ = plan_memory(runs.workload()).fits


MISTAKES = {
    "uneven batch": ({"batch_size": 65, "devices": 2}, "batch_size to be a multiple of the 2 devices, got 65"),
    "uneven chunk": ({"chunk_size": 3, "devices": 2}, "grad_cache.chunk_size to be a multiple of the 2 devices, got 3"),
    "no devices": ({"devices": 0}, "devices >= 1"),
    "keep without chunks": ({"keep": 1}, "expected grad_cache.chunk_size with keep=1"),
    "residual streams without chunks": (
        {"keep_residual": True},
        "expected grad_cache.chunk_size with keep_residual=True",
    ),
    "offload": ({"offload": "disk"}, "offload to be one of .*replay.*'disk'"),
    "siglip": ({"loss": "siglip", "implementation": "dense"}, "siglip loss to be one of .*'dense'"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_settings_that_cannot_be_are_refused(mistake):
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        runs.workload(**changes)


EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
ADVICE = {
    "whole batch": (
        {"batch_size": 4096},
        r"set grad_cache.chunk_size: .*; --config.grad_cache.chunk_size=\d+.* should fit",
    ),
    "large chunks": (
        {"batch_size": 8192, "chunk_size": 4096},
        r"set grad_cache.chunk_size below 4096; --config.grad_cache.chunk_size=\d+.* should fit",
    ),
    "kept chunks": ({"batch_size": 4096, "chunk_size": 64, "keep": 30}, "set grad_cache.keep below 30"),
    "kept residual streams": (
        {
            "model": create_model("tiny", **{"text.layers": 4}),
            "batch_size": 1 << 14,
            "chunk_size": 8,
            "keep_residual": True,
            "offload": "host",
        },
        "set grad_cache.keep_residual to False",
    ),
    "batch on the device": (
        {"model": create_model("tiny"), "batch_size": 1 << 16, "chunk_size": 8},
        "set grad_cache.offload to host",
    ),
    "all pairs": ({"batch_size": 1 << 16, "chunk_size": 8, "implementation": "dense"}, "set implementation to xla"),
    "features": ({"batch_size": 1 << 20, "chunk_size": 1, "offload": "host"}, "set batch_size below 1048576"),
}


@pytest.mark.parametrize("case", list(ADVICE))
def test_running_out_of_memory_names_a_setting_and_ends_with_the_table(case):
    changes, advice = ADVICE[case]
    plan = plan_memory(runs.workload(**changes), 90 * MIB)
    explained = explain_out_of_memory(EXHAUSTED, plan)
    assert isinstance(explained, OutOfMemory) and explained.__cause__ is EXHAUSTED
    assert re.match(f"the device ran out of memory; {advice}", str(explained))
    assert str(explained).endswith(f"\n{format_plan(plan)}")


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: a defect"), ValueError("RESOURCE_EXHAUSTED")])
def test_other_errors_stay_what_they_are(error):
    assert explain_out_of_memory(error, plan_memory(runs.workload())) is error


def test_a_configuration_is_planned_as_it_would_run():
    config = runs.config(**{"grad_cache.chunk_size": 16, "grad_cache.keep": 1, "grad_cache.offload": "host"})
    planned = run.workload(config, 8)
    assert (planned.batch_size, planned.devices) == (32, 8)
    assert planned.cache == GradCacheConfig(chunk_size=16, keep=1, offload="host")
    assert (
        planned.implementation == "xla" and run.workload(config, 8, implementation="triton").implementation == "triton"
    )
    assert planned.model == runs.model() and jnp.dtype(planned.model.feature_dtype) == jnp.float32
