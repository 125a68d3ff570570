"""Plans against XLA's memory analysis and measured training steps."""

import jax
import optax
import oracle
import private_jax
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from infcl_jax.models import create_model
from infcl_jax.planner import activations, compiled_bytes, device_named, plan_memory
from infcl_jax.planner.activations import encoder_memory, row_shapes
from infcl_jax.training import GradCacheConfig, TrainState, make_loss, make_train_step


def test_activations_with_fused_attention_are_those_on_a_gpu(monkeypatch):
    """Expected MiB: XLA's plan for gradients of ViT-B/32's towers, bf16, H200 (JAX 0.11.2)."""
    private_jax.pretend_cudnn(monkeypatch)
    model = create_model("ViT-B/32", **{"dtype": "bfloat16", "vision.attention": "cudnn", "text.attention": "cudnn"})
    for tower, planned in zip(encoder_memory(model), (14_304, 14_487), strict=True):
        assert tower.peak(1024) / 2**20 == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(
    ("name", "batch", "measured"),
    [("ViT-B/16", 1024, 69_684), pytest.param("ViT-L/14", 384, 85_666, marks=pytest.mark.full)],
)
def test_a_named_gpu_is_planned_with_its_kernels(name, batch, measured):
    """Expected MiB: measured bf16 steps on an H200 without the next batch (JAX 0.11.2)."""
    run = runs.workload(model=create_model(name, dtype="bfloat16"), optimizer=optax.adamw(1e-3), batch_size=batch)
    with jax.sharding.use_abstract_mesh(device_named("H200").mesh):
        plan = plan_memory(run)
    assert (plan.peak - plan.next_batch) / 2**20 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("cache", [{}, {"chunk_size": 32}, {"chunk_size": 32, "keep": 1, "keep_residual": True}])
def test_memory_is_linear_in_the_rows(monkeypatch, cache):
    run = runs.workload(model=create_model("tiny"), batch_size=128, cache=GradCacheConfig(**cache))
    plan = plan_memory(run)
    monkeypatch.setattr(activations, "_FEW", 64)
    monkeypatch.setattr(activations, "_MANY", 128)
    monkeypatch.setattr(activations, "_encoder_memory", activations._encoder_memory.__wrapped__)
    assert plan_memory(run).peak == pytest.approx(plan.peak, rel=1e-3)


def test_without_a_named_gpu_attention_stores_its_weights():
    """Here XLA's attention is planned."""
    model = create_model("ViT-B/16", **{"dtype": "bfloat16", "vision.layers": 3, "text.layers": 3})
    run = runs.workload(model=model, batch_size=1024)
    with jax.sharding.use_abstract_mesh(device_named("H200").mesh):
        plan = plan_memory(run)
    assert plan_memory(run).peak > 1.1 * plan.peak


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
    assert 0.75 < encoder_memory(model)[0].peak(32) / compiled < 1.3


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (1, {}),
        (1, {"chunk_size": 64, "keep_residual": True}),
        (4, {"chunk_size": 64, "keep": 1}),
    ],
    ids=["whole", "residual", "devices"],
)
def test_the_total_is_close_to_what_xla_plans_for_the_training_step(devices, settings):
    mesh, model = oracle.mesh_of(devices), create_model("tiny", **{"text.layers": 2})
    shapes = row_shapes(model, 256)
    params = jax.eval_shape(model.init, jax.random.key(0), *shapes.values())["params"]
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=model.apply, params=p, tx=runs.ADAM), params)
    state, batch = (
        jax.tree.map(lambda a, s=spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)), tree)
        for tree, spec in ((state, PartitionSpec()), (shapes, PartitionSpec("data")))
    )
    step = make_train_step(make_loss("clip", mesh), 0, GradCacheConfig(**settings), mesh)
    plan = plan_memory(runs.workload(model=model, batch_size=256, devices=devices, **settings))
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        compiled = step.lower(state, batch).compile()
    planned = plan.peak - plan.next_batch
    assert 0.75 < planned / compiled_bytes(compiled) < 1.1  # the CPU stores more than GPUs
