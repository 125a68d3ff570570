"""Training with a teacher: its features, live and cached, and the settings that allow it."""

import contextlib
import dataclasses

import jax
import numpy as np
import oracle
import pytest
import runs

import infcl_jax
from infcl_jax import run
from infcl_jax.data import ByteTokenizer
from infcl_jax.ops.packing import PackedTokens
from infcl_jax.planner import TeacherMemory, plan_memory
from infcl_jax.run.base import make_run
from infcl_jax.run.build import load_teacher
from infcl_jax.settings import check_config, make_config
from infcl_jax.training import METRICS_FILE, make_train_step, read_metrics

TOKENIZER = ByteTokenizer(runs.CONTEXT, "none")
CHUNKS = {"grad_cache.chunk_size": 16}


@pytest.fixture(scope="module", autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    runs.save(folder, {1: 1.0})
    return folder


def config(workdir, **changes):
    fixed = {"distill.teacher": str(workdir), "augmentation.scale": (1.0, 1.0), "num_workers": 0, "num_threads": 1}
    return runs.config(**fixed | changes)


def captured(config, teacher, mesh, tmp_path):
    """The batch of the first step as the step gets it, and the batch of the pipeline."""
    built, batches = make_run(make_config(config), mesh, run.training_source(config), teacher=teacher), []
    step = teacher.with_features(lambda state, batch: (state, batches.append(batch)), mesh, built.grad_cache)
    with contextlib.closing(built.training_data(tmp_path, built.init.shapes, print)) as data:
        batch = built.next_batch(data)
        step(None, batch)
    return batches[0], batch


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (1, {}),
        (4, CHUNKS | {"batch_size": 40}),  # chunks of 16, 16 and 8 pairs
        (2, CHUNKS | {"batch_size": 40, "grad_cache.offload": "host"}),
        (2, {"distill.cache": "workdir"}),
    ],
    ids=str,
)
def test_the_batch_has_the_features_of_the_encoder(workdir, tmp_path, monkeypatch, devices, changes):
    monkeypatch.setattr("infcl_jax.run.text_packing.MOST", 10.0)  # packs, though it saves little
    mesh = oracle.mesh_of(devices)
    settings = config(workdir, **changes)
    teacher = load_teacher(make_config(settings), mesh)
    got, batch = captured(settings, teacher, mesh, tmp_path)
    encoder = infcl_jax.load(workdir)
    texts = [TOKENIZER.decode(row) for row in runs.token_ids(batch["text"])]
    np.testing.assert_allclose(got["teacher_text"], encoder.encode_texts(texts), atol=1e-5)
    np.testing.assert_allclose(got["teacher_image"], encoder.encode_images(list(np.asarray(batch["image"]))), atol=1e-5)
    assert got["teacher_image"].shape == (settings.batch_size, 16)


def test_a_teacher_of_another_size_and_tokenizer(workdir, tmp_path):
    """It gets its own tokens, and the pixels of the student at its own size."""
    mesh = oracle.mesh_of(2)
    settings = config(workdir, model_overrides=f"{runs.OVERRIDES},vision.image_size=32")
    teacher = load_teacher(make_config(settings), mesh)
    other = infcl_jax.load(workdir, tokenizer=ByteTokenizer(20, "lower"))
    got, batch = captured(settings, dataclasses.replace(teacher, texts=other.tokenizer), mesh, tmp_path)
    assert batch["image"].shape[1:] == (32, 32, 3) and runs.token_ids(batch["teacher_text"]).shape[1:] == (20,)
    texts = [TOKENIZER.decode(row) for row in runs.token_ids(batch["text"])]
    np.testing.assert_allclose(got["teacher_text"], other.encode_texts(texts), atol=1e-5)
    wanted = other.encode_images(list(np.asarray(batch["image"])))  # Pillow, rounded to bytes
    assert (np.asarray(got["teacher_image"]) * wanted).sum(1).min() > 0.999


def test_a_teacher_that_counts_other_tokens_gets_padded_texts(workdir, monkeypatch):
    monkeypatch.setattr("infcl_jax.run.text_packing.MOST", 10.0)
    mesh, settings, losses = oracle.mesh_of(2), make_config(config(workdir)), []
    for alike in (True, False):
        monkeypatch.setattr("infcl_jax.run.base.counts_alike", lambda *towers, alike=alike: alike)
        built = make_run(settings, mesh, run.training_source(settings), teacher=load_teacher(settings, mesh))
        with contextlib.closing(built.open_iterator()) as data:
            batch = built.next_batch(data)
        assert isinstance(batch["text"], PackedTokens)
        losses.append(built.step(built.init.create(), batch)[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_the_limit_of_the_logit_scale_holds_for_the_teacher(workdir):
    assert load_teacher(make_config(config(workdir, max_logit_scale=2.0)), oracle.mesh_of(1)).scale == 2.0


def test_a_step_learns_from_the_teacher(workdir, tmp_path):
    """One step changes the divergence as its gradient says, and has its metric."""
    mesh = oracle.mesh_of(2)
    settings = config(workdir, **CHUNKS, **{"distill.weight": 100.0, "optimizer.learning_rate": 1e-3})
    teacher, source = load_teacher(make_config(settings), mesh), run.training_source(settings)
    state = run.initial_state(settings, mesh)
    loss = run.loss(settings, mesh, teacher_scale=2 * teacher.scale)
    cache, divergences = make_run(make_config(settings), mesh).grad_cache, []
    step = teacher.with_features(make_train_step(loss, settings.seed, cache, mesh), mesh, cache)
    with contextlib.closing(run.training_data(settings, source, TOKENIZER, mesh)) as data:
        batch = run.next_batch(settings, data, mesh)
    for _ in range(4):
        state, metrics = step(state, batch)
        divergences.append(float(metrics["distillation"]))
    assert divergences[0] > divergences[1] > divergences[3] > 0


@pytest.mark.slow
@pytest.mark.parametrize("cache", [pytest.param(None, marks=pytest.mark.full), "workdir"])
def test_a_run_has_the_metric(workdir, tmp_path, cache):
    changes = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None, "total_steps": 1, "seed": 1}
    infcl_jax.train(config(workdir, **changes, **{"distill.cache": cache, "batch_size": 32}), tmp_path)
    assert read_metrics(tmp_path / METRICS_FILE)[0]["distillation"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill.teacher": None, "distill.weight": 0.5}, "expected distill.teacher with distill.weight=0.5"),
        ({"loss": "sogclr"}, "expected loss clip or siglip with distill.teacher, got sogclr"),
        (CHUNKS | {"grad_cache.offload": "replay"}, "offload 'none' or 'host' with distill.teacher"),
        (
            {"frozen": ("text",), "cache_frozen": "workdir"},
            "expected distill.cache with distill.teacher",
        ),
        ({"distill.weight": 0.0}, "expected distill.weight > 0"),
    ],
    ids=str,
)
def test_what_does_not_fit_a_teacher_is_refused(workdir, changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(config(workdir, **changes))


def test_the_plan_has_the_teacher(workdir):
    settings, model = config(workdir), runs.model(embed_dim=32)
    without, live, cached = (
        plan_memory(run.workload(settings, 2, teacher=teacher))
        for teacher in (None, TeacherMemory(model), TeacherMemory(model, cached=True))
    )
    features = 2 * 16 * 32 * 4
    assert (without.teacher, cached.teacher) == (0, 2 * features)
    assert live.teacher > 4 * 10_000 + features and live.loss > without.loss
    assert live.peak > cached.peak > without.peak
