"""The memory planner: exact where it says so, close to what XLA plans elsewhere, and its searches find the edge."""

import dataclasses
import math
import re
import types

import jax
import jax.numpy as jnp
import optax
import oracle
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from infcl_jax import run
from infcl_jax.models import create_model
from infcl_jax.ops.attention.api import best_attention
from infcl_jax.planner import (
    DEVICES,
    OutOfMemory,
    Workload,
    activations,
    best_chunk_size,
    compare_with_compiled,
    compiled_workspace,
    device_named,
    devices,
    explain_out_of_memory,
    format_plan,
    keep_most,
    largest_batch,
    loss_workspace,
    most_kept,
    plan_memory,
)
from infcl_jax.planner.activations import row_shapes, towers
from infcl_jax.planner.devices import planned_device
from infcl_jax.training import GradCacheConfig, TrainState, create_state, make_loss, make_train_step, sharding

ADAM = optax.adamw(1e-3)
MIB = 1 << 20


def workload(**changes):
    return Workload(**({"model": runs.model(), "optimizer": ADAM, "batch_size": 64} | changes))


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [(ADAM, {}), (optax.sgd(1e-3, momentum=0.9), {"param_dtype": "bfloat16", "init_logit_bias": -10.0})],
)
def test_parameters_and_optimizer_state_are_those_of_a_real_state(optimizer, changes):
    model = runs.model(**changes)
    with jax.numpy_dtype_promotion("standard"):  # flax multiplies fp32 activations with bf16 parameters
        state = create_state(model, optimizer, runs.SIDE, runs.CONTEXT, 0, oracle.mesh_of(1))
        plan = plan_memory(workload(model=model, optimizer=optimizer))
    assert (plan.parameters, plan.optimizer) == (nbytes(state.params), nbytes(state.opt_state))
    assert plan.gradients == sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))


def test_of_a_sharded_state_a_device_holds_its_part_and_for_the_step_all_parameters(monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SIZE", 16)
    state = create_state(runs.model(), ADAM, runs.SIDE, runs.CONTEXT, 0, oracle.mesh_of(4), "fsdp")
    whole, plan = (plan_memory(workload(devices=4, parameter_sharding=kind)) for kind in ("replicated", "fsdp"))
    parts = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, (state.params, state.opt_state))
    assert (plan.parameters, plan.optimizer, plan.updates) == (nbytes(parts[0]), nbytes(parts[1]), nbytes(parts[0]))
    assert plan.gradients == whole.gradients + whole.parameters


@pytest.mark.parametrize("chunk_size", [None, 16])
def test_batch_and_features_are_linear_in_the_batch(chunk_size):
    small, large = (plan_memory(workload(batch_size=b, devices=4, chunk_size=chunk_size)) for b in (64, 256))
    assert small.batch == small.next_batch == nbytes(runs.batch(16))
    assert small.features == 2 * 2 * 16 * runs.MODEL["embed_dim"] * 4
    assert (large.batch, large.features) == (4 * small.batch, 4 * small.features)


@pytest.mark.parametrize("residency", ["host", "replay"])
def test_off_the_devices_three_chunks_are_there(residency):
    plan = plan_memory(workload(batch_size=1024, chunk_size=32, residency=residency))
    assert plan.batch + plan.next_batch == nbytes(runs.batch(96))
    assert plan.gradients > plan_memory(workload(batch_size=1024, chunk_size=32)).gradients


def test_activations_grow_with_the_chunk_and_not_with_the_batch():
    at = {c: plan_memory(workload(batch_size=4096, chunk_size=c)).activations for c in (64, 128, 256)}
    assert at[256] - at[128] == 2 * (at[128] - at[64]) > 0
    assert plan_memory(workload(batch_size=8192, chunk_size=64)).activations == at[64]
    whole = [plan_memory(workload(batch_size=b)).kept for b in (4096, 8192)]
    assert whole[1] == pytest.approx(2 * whole[0], rel=1e-3) and whole[0] > 10 * at[64]


def test_kept_chunks_count_until_all_are_kept():
    plans = [plan_memory(workload(batch_size=256, chunk_size=64, keep=keep)) for keep in range(6)]
    kept = [plan.kept for plan in plans]
    assert kept[0] == 0 and kept[2] == pytest.approx(2 * kept[1], rel=1e-2) and kept[4] == kept[5]
    assert kept[4] == plan_memory(workload(batch_size=256)).kept
    assert plans[4].activations < plans[3].activations == plans[0].activations


def test_activations_with_fused_attention_are_those_on_a_gpu(monkeypatch):
    """MiB that XLA plans for the gradients of ViT-B/32's towers in bf16 on an H200 (JAX 0.11.2)."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_000)
    model = create_model("ViT-B/32", **{"dtype": "bfloat16", "vision.attention": "cudnn", "text.attention": "cudnn"})
    for tower, planned in zip(towers(model), (14_304, 14_487), strict=True):
        assert tower.peak(1024) / 2**20 == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(("name", "batch", "measured"), [("ViT-B/16", 1024, 69_684), ("ViT-L/14", 384, 85_666)])
def test_a_named_gpu_is_planned_with_its_kernels(name, batch, measured):
    """MiB that training steps in bf16 took on an H200, without the next batch (JAX 0.11.2)."""
    run = workload(model=create_model(name, dtype="bfloat16"), optimizer=optax.adamw(1e-3), batch_size=batch)
    with jax.sharding.use_abstract_mesh(device_named("H200").mesh):
        plan = plan_memory(run)
    assert (plan.total - plan.next_batch) / 2**20 == pytest.approx(measured, rel=0.03)
    assert plan_memory(run).total > 1.1 * plan.total  # here XLA's attention, which stores weights


def test_every_call_of_a_function_has_arrays_of_its_own():
    def hidden(x, w):
        return jnp.tanh(x @ w)

    def peak(hidden):
        jaxpr = jax.make_jaxpr(lambda x, w: (hidden(x, w) @ w) * (hidden(x, w + 1) @ w))(ones, ones)
        return activations._peak(jaxpr.jaxpr)

    ones = jnp.ones((8, 8))
    assert peak(jax.jit(hidden)) == peak(hidden) > 0


@pytest.mark.parametrize("changes", [{}, {"vision.remat": "full"}], ids=["plain", "remat"])
def test_an_encoders_activations_are_close_to_what_xla_plans(changes):
    model = create_model("tiny", **changes)
    rows = row_shapes(model, 32)["image"]
    params = jax.eval_shape(model.init, jax.random.key(0), *row_shapes(model, 1).values())["params"]["visual"]

    def both(params, image, cotangent):
        def encode(params):
            return model.apply({"params": {"visual": params}}, image, method="encode_image")

        return jax.vjp(encode, params)[1](cotangent)

    cotangent = jax.ShapeDtypeStruct((32, 64), model.feature_dtype)
    compiled = jax.jit(both).lower(params, rows, cotangent).compile().memory_analysis().temp_size_in_bytes
    assert 0.75 < towers(model)[0].peak(32) / compiled < 1.3


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (1, {}),
        (1, {"chunk_size": 64}),
        (1, {"chunk_size": 64, "keep_residual": True}),
        (4, {"chunk_size": 64, "keep": 1}),
    ],
    ids=["whole", "chunks", "residual", "devices"],
)
def test_the_total_is_close_to_what_xla_plans_for_the_training_step(devices, settings):
    mesh, model = oracle.mesh_of(devices), create_model("tiny", **{"text.layers": 2})
    shapes = row_shapes(model, 256)
    params = jax.eval_shape(model.init, jax.random.key(0), *shapes.values())["params"]
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=model.apply, params=p, tx=ADAM), params)
    state, batch = (
        jax.tree.map(lambda a, s=spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)), tree)
        for tree, spec in ((state, PartitionSpec()), (shapes, PartitionSpec("data")))
    )
    step = make_train_step(make_loss("clip", mesh), 0, GradCacheConfig(**settings), mesh)
    plan = plan_memory(workload(model=model, batch_size=256, devices=devices, **settings))
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        compiled = step.lower(state, batch).compile()
    assert 0.75 < compare_with_compiled(plan, compiled) < 1.1  # the CPU stores more than GPUs


def test_a_step_of_several_programs_cannot_be_compared():
    plan = plan_memory(workload(chunk_size=32, residency="host"))
    with pytest.raises(ValueError, match="expected a plan with residency 'device', got 'host'"):
        compare_with_compiled(plan, None)


# Of docs/benchmarks.md: implementation, b, D, devices, MiB.
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


@pytest.mark.parametrize(("loss", "implementation"), [("clip", "xla"), ("siglip", "xla"), ("clip", "dense")])
def test_the_loss_can_be_compiled_instead(loss, implementation):
    mesh, run = oracle.mesh_of(4), workload(devices=4, loss=loss, implementation=implementation)
    plan = plan_memory(run, mesh=mesh)
    assert plan.loss == compiled_workspace(implementation, 64, 16, "float32", mesh, loss) > 0
    assert plan.loss_method == "compiled"
    with pytest.raises(ValueError, match="expected a mesh of 4 devices, got 2"):
        plan_memory(run, mesh=oracle.mesh_of(2))


SEARCHES = [{}, {"devices": 4}, {"devices": 2, "chunk_size": 48}, {"chunk_size": 64, "residency": "host"}]


@pytest.mark.parametrize("settings", SEARCHES)
@pytest.mark.parametrize("memory", [24 * MIB, 150 * MIB])
def test_the_largest_batch_fits_and_one_step_more_does_not(settings, memory):
    run = workload(**(settings | {"batch_size": settings.get("devices", 1)}))
    found, step = largest_batch(run, memory), run.chunk_size or run.devices
    assert found % step == 0 and found > step
    assert plan_memory(dataclasses.replace(run, batch_size=found), memory).fits
    assert not plan_memory(dataclasses.replace(run, batch_size=found + step), memory).fits


@pytest.mark.parametrize("settings", [{}, {"devices": 4}, {"residency": "replay", "chunk_size": 1, "keep": 1}])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_best_chunk_size_fits_and_twice_that_does_not(settings, share):
    """In a share of the memory that one chunk of all rows would need."""
    run = workload(**(settings | {"batch_size": 4096}))
    memory = int(share * plan_memory(dataclasses.replace(run, chunk_size=4096)).total)
    found = best_chunk_size(run, memory)
    assert (found // run.devices).bit_count() == 1 and found < run.batch_size
    assert plan_memory(dataclasses.replace(run, chunk_size=found), memory).fits
    assert not plan_memory(dataclasses.replace(run, chunk_size=2 * found), memory).fits


@pytest.mark.parametrize(("batch", "devices", "expected"), [(1, 1, 1), (96, 1, 128), (96, 4, 128), (64, 4, 64)])
def test_a_chunk_never_exceeds_what_holds_the_batch(batch, devices, expected):
    assert best_chunk_size(workload(batch_size=batch, devices=devices), 1 << 40) == expected


@pytest.mark.parametrize("settings", [{"chunk_size": 24}, {"chunk_size": 48, "devices": 2, "residency": "host"}])
@pytest.mark.parametrize(("share", "expected"), [(0.5, "none"), (1.2, "some"), (1e6, "all")])
def test_the_most_chunks_kept_fit_and_one_more_does_not(settings, share, expected):
    run = workload(**(settings | {"batch_size": 4096}))
    memory, chunks = int(share * plan_memory(run).total), math.ceil(4096 / run.chunk_size)
    found = most_kept(run, memory)
    assert {"none": found == 0, "some": 0 < found < chunks, "all": found == chunks}[expected]
    if expected != "none":
        assert plan_memory(dataclasses.replace(run, keep=found), memory).fits
    if expected == "some":
        assert not plan_memory(dataclasses.replace(run, keep=found + 1), memory).fits


@pytest.mark.parametrize(("beside", "expected"), [(0, "none"), (0.5, "chunks"), (1.5, "streams"), (1e6, "all")])
def test_residual_streams_are_kept_before_chunks_unless_all_fits(beside, expected):
    """With memory beside that of a plan for so many times the residual streams."""
    model = create_model("tiny", **{"vision.layers": 4, "text.layers": 4})
    run = workload(model=model, batch_size=4096, chunk_size=64)
    least, streams = (plan_memory(dataclasses.replace(run, keep_residual=kept)).total for kept in (False, True))
    memory = int(least + beside * (streams - least))
    kept = keep_most(run, memory)
    assert plan_memory(kept, memory).fits and kept.keep_residual == (expected == "streams")
    assert {"none": kept.keep == 0, "all": kept.keep == 64}.get(expected, 0 < kept.keep < 64)
    assert kept.keep == most_kept(kept, memory)


def test_chunks_are_kept_of_chunks():
    with pytest.raises(ValueError, match=r"expected a chunk_size, .* got None"):
        most_kept(workload(), 1 << 40)


def test_the_devices_at_hand_are_planned_one_by_one(monkeypatch):
    """Several GPUs without a mesh: nobody knows which of them has which rows."""
    gpu = types.SimpleNamespace(device_kind="NVIDIA H200", platform="gpu", core_count=132, compute_capability="9.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu] * 8)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert best_attention((64, 50, 12, 64), "bfloat16") == "cudnn"
    with planned_device():
        assert best_attention((64, 50, 12, 64), "bfloat16") == "mosaic_gpu"


@pytest.mark.parametrize("search", [largest_batch, best_chunk_size])
def test_what_never_fits_is_refused(search):
    with pytest.raises(ValueError, match=r"expected memory for a (batch|chunk) of 1 .*got less"):
        search(workload(), 1000)


@pytest.mark.parametrize("memory", [None, 1 << 30])
def test_the_table_has_every_part_aligned(memory):
    plan = plan_memory(workload(chunk_size=32), memory)
    heading, *lines = format_plan(plan).splitlines()
    assert "1 device(s), batch_size 64, chunk_size 32, keep 0, residency device, loss xla" in heading
    assert [line[: max(map(len, (s.counts for s in plan.sources.values())))].strip() for line in lines] == [
        *(source.counts for source in plan.sources.values()),
        "most at one time",
        *(["memory for JAX"] if memory else []),
    ]
    assert len({re.search(r" [KMG]?i?B( |$)", line).start() for line in lines}) <= 2
    assert all(("%" in line) == (memory is not None) for line in lines[:-1])
    assert set(plan.sources) == {
        field.name for field in dataclasses.fields(plan) if field.name not in ("workload", "loss_method", "memory")
    }


@pytest.mark.parametrize(("name", "known"), [("H200", "H200-141"), ("rtx 4090", "RTX4090"), ("a100-80", "A100-80")])
def test_devices_are_found_by_name(name, known, monkeypatch):
    assert device_named(name) == DEVICES[known]
    monkeypatch.setattr(devices, "memory_share", lambda: 0.5)
    assert device_named(name).usable == DEVICES[known].memory // 2


@pytest.mark.parametrize("name", ["H999", "A100", ""])
def test_an_unknown_device_is_answered_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"expected a device among .*A100-40.*H200-141.*got"):
        device_named(name)


def test_without_memory_nothing_can_be_said_to_fit():
    with pytest.raises(ValueError, match="expected the memory of a device"):
        _ = plan_memory(workload()).fits


MISTAKES = {
    "uneven batch": ({"batch_size": 65, "devices": 2}, "batch_size to be a multiple of the 2 devices, got 65"),
    "uneven chunk": ({"chunk_size": 3, "devices": 2}, "chunk_size to be a multiple of the 2 devices, got 3"),
    "no devices": ({"devices": 0}, "devices >= 1"),
    "keep without chunks": ({"keep": 1}, "expected a chunk_size with keep=1"),
    "residual streams without chunks": ({"keep_residual": True}, "expected a chunk_size with .* keep_residual=True"),
    "residency": ({"residency": "disk"}, "residency to be one of .*replay.*'disk'"),
    "implementation": ({"implementation": "fast"}, "implementation to be one of .*'fast'"),
    "loss": ({"loss": "mse"}, "loss to be one of .*'mse'"),
    "siglip": ({"loss": "siglip", "implementation": "dense"}, "siglip loss to be one of .*'dense'"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_settings_that_cannot_be_are_refused(mistake):
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        workload(**changes)


EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
ADVICE = {
    "whole batch": ({"batch_size": 4096}, r"set grad_cache.chunk_size \(\d+ should fit\): "),
    "large chunks": (
        {"batch_size": 8192, "chunk_size": 4096},
        r"set grad_cache.chunk_size below 4096 \(\d+ should fit\)",
    ),
    "kept chunks": ({"batch_size": 4096, "chunk_size": 64, "keep": 30}, "set grad_cache.keep below 30"),
    "kept residual streams": (
        {
            "model": create_model("tiny", **{"text.layers": 8}),
            "batch_size": 1 << 14,
            "chunk_size": 8,
            "keep_residual": True,
            "residency": "host",
        },
        "set grad_cache.keep_residual to False",
    ),
    "batch on the device": (
        {"model": create_model("tiny"), "batch_size": 1 << 16, "chunk_size": 8},
        "set grad_cache.residency to host",
    ),
    "all pairs": ({"batch_size": 1 << 16, "chunk_size": 8, "implementation": "dense"}, "set implementation to xla"),
    "features": ({"batch_size": 1 << 20, "chunk_size": 1, "residency": "host"}, "set batch_size below 1048576"),
}


@pytest.mark.parametrize("case", list(ADVICE))
def test_running_out_of_memory_names_a_setting_and_ends_with_the_table(case):
    changes, advice = ADVICE[case]
    plan = plan_memory(workload(**changes), 90 * MIB)
    explained = explain_out_of_memory(EXHAUSTED, plan)
    assert isinstance(explained, OutOfMemory) and explained.__cause__ is EXHAUSTED
    assert re.match(f"the device ran out of memory; {advice}", str(explained))
    assert str(explained).endswith(f"\n{format_plan(plan)}")


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: a defect"), ValueError("RESOURCE_EXHAUSTED")])
def test_other_errors_stay_what_they_are(error):
    assert explain_out_of_memory(error, plan_memory(workload())) is error


def test_a_configuration_is_planned_as_it_would_run():
    config = runs.config(**{"grad_cache.chunk_size": 16, "grad_cache.keep": 1, "grad_cache.residency": "host"})
    planned = run.workload(config, 8)
    settings = planned.batch_size, planned.devices, planned.chunk_size, planned.keep, planned.residency
    assert settings == (32, 8, 16, 1, "host")
    assert planned.implementation == "xla" and run.workload(config, 8, "triton").implementation == "triton"
    assert planned.model == runs.model() and jnp.dtype(planned.model.feature_dtype) == jnp.float32


PLAN = "experiments.plan"
QUICKSTART = "--config=configs/quickstart.py"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--device=H200", "--devices=8", "--config.batch_size=4096"),
            r"8 device.*batch_size 4096, loss mosaic_gpu\n(.*\n)*fits\nlargest batch_size: \d+\n.*chunk_size: 4096",
        ),
        ((), r"each of 4 device.*loss xla\n(.*\n)*largest batch and chunk: give --device or --memory_gib.*cpu"),
        (
            ("--device=L4", "--config.grad_cache.chunk_size=64", "--config.grad_cache.keep=-1"),
            r"chunk_size 64, keep 4, .*\n(.*\n)*fits\n(.*\n)*most grad_cache.keep: 4\n",
        ),
        (("--memory_gib=0.001",), r"does not fit\nlargest batch_size: none, .*\nbest grad_cache.chunk_size: none, "),
    ],
)
def test_the_command_prints_the_table_and_what_fits(arguments, expected):
    process = runs.start(PLAN, QUICKSTART, *arguments)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, "")
    assert re.search(expected, stdout), stdout
    assert re.search(r"activations kept +[\d.]+ MiB .*traced", stdout)


WRONG = {
    "no config": ((), "expected --config"),
    "unknown device": ((QUICKSTART, "--device=H999"), "among .*H200-141.*'H999'"),
    "uneven batch": ((QUICKSTART, "--device=L4", "--devices=3"), "multiple of the 3 devices, got 256"),
    "no devices": ((QUICKSTART, "--devices=0"), "--devices > 0, got 0"),
    "no memory": ((QUICKSTART, "--memory_gib=-1"), "--memory_gib > 0, got -1"),
    "kept in unknown memory": (
        (QUICKSTART, "--config.grad_cache.chunk_size=64", "--config.grad_cache.keep=-1"),
        "grad_cache.keep >= 0 on devices that do not tell their memory, got -1",
    ),
    "misspelt key": ((QUICKSTART, "--config.batchsize=3"), "no such setting: 'batchsize'.*--help lists the settings"),
}


@pytest.mark.parametrize("mistake", list(WRONG))
def test_a_mistake_is_one_line(mistake):
    arguments, message = WRONG[mistake]
    process = runs.start(PLAN, *arguments)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", stderr), stderr
