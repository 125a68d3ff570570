"""Training with a guide: the step, the settings that allow it, resumed runs and the command."""

import contextlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import retrieval_runs
import runs

import infcl_jax
from infcl_jax import run
from infcl_jax.planner import TeacherMemory, plan_memory
from infcl_jax.run.base import make_run
from infcl_jax.run.build import load_teacher
from infcl_jax.settings import make_config
from infcl_jax.training import CHECKPOINTS, make_train_step

SGD = {  # whose update is the gradient
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 1.0,
    "optimizer.schedule": "constant",
    "optimizer.beta1": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": None,
}
MARGIN = {"guide.margin": 0.05}
CHUNKS = {"grad_cache.chunk_size": 8}
HOST = CHUNKS | {"grad_cache.offload": "host"}
TRAINING_ONLY = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None}
TEXTS = {"loss": "retrieval", "model": "bert-tiny"}
SLOW, FULL = pytest.mark.slow, pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


@pytest.fixture(scope="module")
def guide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    runs.save(folder, {1: 1.0})
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus with a run of text retrieval, whose texts are shorter than those of the student."""
    folder = retrieval_runs.write_corpus(tmp_path_factory.mktemp("corpus"))
    changes = {"seed": 7, "model_overrides": "text.layers=1,text.context_length=20", "text_retrieval.query_length": 16}
    retrieval_runs.save(folder / "guide", retrieval_runs.settings(folder, **changes))
    return folder


def config(guide, **changes):
    fixed = {"guide.model": str(guide), "augmentation.scale": (1.0, 1.0), "num_workers": 0, "num_threads": 1, "seed": 3}
    return runs.config(**fixed | changes)


def retrieval_config(corpus, **changes):
    return retrieval_runs.settings(corpus, **{"guide.model": str(corpus / "guide"), "seed": 3} | changes)


def guided(x, y, scale, guide, labels, settings, mask):
    """Compute the loss and its gradients in float64; with a mask of the columns, over the rows alone."""
    x, y, *guide = (np.asarray(a, np.float64) for a in (x, y, *guide))
    scale, rows, sides = float(scale), np.arange(len(x)), 2 if mask is None else 1
    t, own = guide[0] @ guide[1].T, labels[:, None] == np.arange(len(y))
    valid = np.ones(len(y), bool) if mask is None else mask
    positive = t[rows, labels]
    limit = positive - settings.margin * (np.abs(positive) if settings.margin_strategy == "relative" else 1)
    s, loss, d_z = x @ y.T, 0.0, np.zeros(t.shape)
    for axis in (1, 0)[:sides]:
        gap = t - np.expand_dims(limit, axis)
        kept = valid & (own | (gap <= 0))
        assert np.abs(gap[~own]).min() > 1e-6  # rounding decides no pair
        assert 0.1 < kept[:, valid].mean() < 0.9
        z = np.where(kept, scale * s, -np.inf)
        lse = np.log(np.exp(z).sum(axis))
        loss += (lse - scale * s[rows, labels]).sum() / len(x) / sides
        d_z += (np.exp(z - np.expand_dims(lse, axis)) - own) / len(x) / sides
    return loss, (scale * d_z @ y, scale * d_z.T @ x, (d_z * s).sum())


def pulled_back(model, params, rows, cotangents):
    """Pull cotangents of both features and the scale back to the parameters."""

    def value(params):
        outputs = model.apply({"params": params}, *rows)[:3]
        return sum((output * jnp.float32(d)).sum() for output, d in zip(outputs, cotangents, strict=True))

    return jax.jit(jax.grad(value))(params)


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        pytest.param(1, {}, marks=FULL),
        (4, CHUNKS),
        pytest.param(2, HOST, marks=FULL),
        (2, {"guide.cache": "workdir", "guide.margin_strategy": "relative"}),
        pytest.param(1, {"loss": "retrieval"}, marks=FULL),
        (4, CHUNKS | {"loss": "retrieval", "grad_cache.passage_chunk_size": 16}),
        pytest.param(2, HOST | {"loss": "retrieval", "guide.margin_strategy": "relative"}, marks=FULL),
    ],
    ids=str,
)
def test_the_step_is_that_of_float64(guide, corpus, tmp_path, devices, changes):
    retrieval, mesh, batches = changes.get("loss") == "retrieval", oracle.mesh_of(devices), []
    make = retrieval_config(corpus, **MARGIN | SGD | changes) if retrieval else config(guide, **MARGIN | SGD | changes)
    settings = make_config(make)
    built = make_run(settings, mesh, run.training_source(settings), teacher=load_teacher(settings, mesh))
    state = built.init.create()
    params = jax.device_get(state.params)
    step = make_train_step(built.loss, settings.seed, built.grad_cache, mesh)

    def captured(state, batch):
        batches.append(jax.device_get(batch))
        return step(state, batch)

    with contextlib.closing(built.training_data(tmp_path, state, print)) as data:
        state, metrics = built.teacher.with_features(captured, mesh, built.grad_cache)(state, built.next_batch(data))
    batch, names = batches[0], ("query", "passage") if retrieval else ("image", "text")
    rows = [batch[name] if name == "image" else runs.token_ids(batch[name]) for name in names]
    x, y, scale, _ = jax.jit(built.model.apply)({"params": params}, *rows)
    labels = np.arange(len(x)) * (len(y) // len(x))
    loss, cotangents = guided(
        x, y, scale, [batch[f"teacher_{name}"] for name in names], labels, settings.guide, batch.get("passage_mask")
    )
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    expected = pulled_back(built.model, params, rows, cotangents)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 0.01  # far above the tolerance
    jax.tree.map(
        lambda old, new, want: np.testing.assert_allclose(old - np.asarray(new), want, atol=1e-5, rtol=1e-4),
        params,
        state.params,
        expected,
    )


@SLOW
@pytest.mark.parametrize("cache", [None, pytest.param("workdir", marks=pytest.mark.full)])
def test_a_resumed_run_has_the_same_bits(guide, tmp_path, cache):
    changes = MARGIN | TRAINING_ONLY | {"guide.cache": cache, "total_steps": 4, "checkpoint_every": 2}
    finished = []
    for _ in range(2):
        infcl_jax.train(config(guide, **changes), tmp_path)
        finished.append((runs.history(tmp_path)[0], jax.device_get(infcl_jax.load(tmp_path).variables)))
        shutil.rmtree(tmp_path / CHECKPOINTS / "4")  # the next run resumes at step 2
    assert finished[0][0] == finished[1][0] and runs.equal_bits(*(variables for _, variables in finished))


@FULL
def test_the_command_trains_with_the_run_of_another_command(tmp_path):
    for name, changes in (("guide", {}), ("student", {"guide.model": str(tmp_path / "guide"), **MARGIN})):
        flags = runs.flags(runs.config(**TRAINING_ONLY, total_steps=1, **changes))
        finished = runs.command("experiments.train", f"--workdir={tmp_path / name}", *flags)
        assert finished.returncode == 0, finished
    guide, student = (runs.history(tmp_path / name)[0][0]["loss"] for name in ("guide", "student"))
    assert student < guide  # the same model with fewer negatives


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guide.model": None} | MARGIN, "expected guide.model with guide.margin=0.05, got None"),
        ({"guide.margin_strategy": "both"}, "expected guide.margin_strategy to be one of"),
        ({"loss": "siglip"}, "expected loss clip or retrieval with guide.model, got siglip"),
        ({"loss": "fastclip_v3"}, "expected loss clip or retrieval with guide.model, got fastclip_v3"),
        ({"distill.teacher": "other"}, "expected guide.model or distill.teacher, got both"),
        (CHUNKS | {"grad_cache.offload": "replay"}, "offload 'none' or 'host' with guide.model"),
        ({"frozen": ("text",), "cache_frozen": "workdir"}, "expected guide.cache with guide.model and cache_frozen"),
        (TRAINING_ONLY | TEXTS | {"guide.cache": "workdir"}, "expected guide.cache=None with loss 'retrieval'"),
    ],
    ids=str,
)
def test_what_does_not_fit_a_guide_is_refused(guide, changes, message):
    with pytest.raises(ValueError, match=message):
        make_config(config(guide, **changes))


def test_a_guide_has_the_inputs_of_the_student(guide, corpus):
    for settings, inputs in (
        (config(corpus / "guide"), "images and texts"),
        (retrieval_config(corpus, **{"guide.model": str(guide)}), "queries and passages"),
    ):
        with pytest.raises(ValueError, match=f"expected guide.model to be a model of {inputs}, got"):
            load_teacher(make_config(settings), oracle.mesh_of(1))


def test_the_plan_has_the_guide_of_text_retrieval(corpus):
    settings = retrieval_config(corpus)
    teacher = load_teacher(settings, oracle.mesh_of(1))
    without, live = (
        plan_memory(run.workload(settings, 2, teacher=memory)) for memory in (None, TeacherMemory(teacher.model))
    )
    features = 3 * 8 * 32 * 4  # a query and two passages, for each of 8 rows
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(teacher.variables))
    assert (without.teacher, live.teacher) == (0, parameters + features)
    assert "\nteacher " in infcl_jax.plan(settings)
