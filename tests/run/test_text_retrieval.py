"""Dense text retrieval: runs on a corpus that the tests make."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from safetensors.numpy import save_file

import infcl_jax
from infcl_jax import retrieval_loss, run
from infcl_jax.distributed import shard_batch
from infcl_jax.evaluation.text_retrieval import has_answer
from infcl_jax.run.text_retrieval import initialize_pair, read_text_pair
from infcl_jax.settings import make_config
from infcl_jax.training import make_train_step

TOPICS = 48
BATCH = 16


def write_corpus(folder, seed=0):
    """Write training data, a corpus and questions; a hard negative has the question's words without its answer."""
    rng = np.random.default_rng(seed)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, 4)) for _ in range(TOPICS)]
    answers = ["".join(chr(65 + c) for c in rng.integers(0, 26, 3)) for _ in range(TOPICS)]
    kinds = ("tall", "old")

    def passage(topic, kind):
        return {"title": words[topic], "text": f"{kind} {answers[topic] if kind == kinds[0] else 'none'}"}

    train, corpus = [], ["id\ttext\ttitle"]
    for topic in range(TOPICS):
        train.append(
            {
                "question": f"how tall {words[topic]}",
                "answers": [answers[topic]],
                "positive_ctxs": [passage(topic, "tall")],
                "hard_negative_ctxs": [passage(topic, "old")] if topic else [],
            }
        )
        corpus += [f"{2 * topic + i}\t{passage(topic, k)['text']}\t{words[topic]}" for i, k in enumerate(kinds)]
    (folder / "train.json").write_text(json.dumps(train))
    (folder / "corpus.tsv").write_text("\n".join(corpus) + "\n")
    (folder / "qa.csv").write_text("".join(f"{r['question']}\t{r['answers']!r}\n" for r in train))
    return folder


@pytest.fixture(autouse=True)
def promotion():
    """The promotion of JAX's defaults: optax raises a float to an integer power."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("dpr"))


def settings(folder, **changes):
    return make_config(
        {
            "dataset": str(folder / "train.json"),
            "model": "bert-tiny",
            "model_overrides": "text.layers=1,text.context_length=24",
            "loss": "retrieval",
            "batch_size": BATCH,
            "total_steps": 2,
            "num_workers": 0,
            "num_threads": 1,
            "optimizer.warmup_steps": 0,
            "optimizer.weight_decay": 0.0,
            "text_retrieval.corpus": str(folder / "corpus.tsv"),
            "text_retrieval.questions": str(folder / "qa.csv"),
        }
        | changes
    )


def trained(config, devices=1, steps=None):
    """Train a run in this process and return its state and its first loss."""
    mesh = oracle.mesh_of(devices)
    source = run.training_source(config)
    step = make_train_step(run.loss(config, mesh, source), config.seed, run.workload(config, devices).cache, mesh)
    state, first = run.initial_state(config, mesh, source), None
    data = run.training_data(config, source, mesh=mesh)
    try:
        for _ in range(steps or config.total_steps):
            state, metrics = step(state, run.next_batch(config, data, mesh))
            first = metrics["loss"] if first is None else first
    finally:
        data.close()
    return state, float(first)


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_and_devices_do_not_change_the_parameters(folder, tied):
    overrides = f"text.layers=1,text.context_length=24,tied={tied}"
    sgd = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1, "model_overrides": overrides}
    (whole, loss) = trained(settings(folder, **sgd))
    chunks = [(1, 1, 1), (4, None, 1), (BATCH, 2 * BATCH, 1), (4, 8, 4), (None, None, 4)]
    for query, passage, devices in chunks:
        cache = {"grad_cache.chunk_size": query, "grad_cache.passage_chunk_size": passage}
        state, value = trained(settings(folder, **sgd, **cache), devices)
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), state.params, whole.params)
    assert set(whole.params) == ({"text"} if tied else {"query", "passage"})


def test_the_loss_is_that_of_the_function_without_missing_negatives(folder):
    config, mesh = settings(folder, **{"text_retrieval.hard_negatives": 2}), oracle.mesh_of(1)
    state = run.initial_state(config, mesh)
    data = run.training_data(config, run.training_source(config), mesh=mesh)
    batch = run.next_batch(config, data, mesh)
    data.close()
    assert batch["passage"].shape == (3 * BATCH, 24)
    mask = np.asarray(batch["passage_mask"]).reshape(BATCH, 3)
    assert mask[:, 0].all() and not mask[:, 2].any()
    output = state.apply_fn(state.variables, batch["query"], batch["passage"])
    result = run.loss(config, mesh)(output, passage_mask=batch["passage_mask"])
    rows = np.flatnonzero(mask.ravel())
    labels = np.searchsorted(rows, np.arange(BATCH) * 3)
    expected = retrieval_loss(output.query, output.passage[rows], 1.0, labels=labels)
    np.testing.assert_allclose(result.value, expected, rtol=1e-6)


GOLDEN = Path(__file__).parents[1] / "golden" / "grad_cache.npz"
GOLDEN_MODEL = (
    "text.width=16,text.layers=2,text.heads=2,text.vocab_size=40,text.max_positions=16,text.context_length=12,"
    "text.pool=cls"
)


@pytest.mark.parametrize("chunks", [None, (1, 1), (2, 5)])
@pytest.mark.parametrize("devices", [1, 5])
def test_loss_and_gradients_are_those_of_grad_cache(folder, tmp_path, chunks, devices):
    golden, mesh = np.load(GOLDEN), oracle.mesh_of(devices)
    config = settings(
        folder,
        **{
            "batch_size": 5,
            "model_overrides": GOLDEN_MODEL,
            "optimizer.name": "sgd",
            "optimizer.beta1": 0.0,
            "optimizer.learning_rate": 1.0,
            "optimizer.schedule": "constant",
            "grad_cache.chunk_size": chunks and chunks[0] * devices,
            "grad_cache.passage_chunk_size": chunks and chunks[1] * devices,
        },
    )
    if chunks and chunks[0] * devices > 5:
        pytest.skip("a chunk has at most the rows of the batch")
    model, state = read_text_pair(config), run.initial_state(config, mesh)
    for name in ("query", "passage"):
        weights = {k.removeprefix(f"{name}/weight/"): golden[k] for k in golden if k.startswith(f"{name}/weight/")}
        path = hugging_face_folder(tmp_path / name, weights)
        state = state.replace(params=state.params | {name: initialize_pair(path, model, state).params[name]})
    np.testing.assert_allclose(
        state.apply_fn(state.variables, golden["query/ids"], method="encode_query"), golden["query/feature"], atol=2e-5
    )
    batch = {name: golden[f"{name}/ids"] for name in ("query", "passage")} | {"passage_mask": np.ones(10, bool)}
    batch = {name: shard_batch(mesh, array) for name, array in batch.items()}
    before = jax.device_get(state.params)
    step = make_train_step(run.loss(config, mesh), 0, run.workload(config, devices).cache, mesh)
    after, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], golden["loss"], rtol=1e-5)
    gradients = jax.tree.map(lambda a, b: a - np.asarray(b), before, after.params)
    for name in ("query", "passage"):
        expected = {k.removeprefix(f"{name}/gradient/"): golden[k] for k in golden if k.startswith(f"{name}/gradient/")}
        path = hugging_face_folder(tmp_path / f"{name}_gradient", expected)
        expected = initialize_pair(path, model, after).params[name]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=3e-5), gradients[name], expected)


def hugging_face_folder(folder, tensors):
    """Write a BERT as transformers saves it."""
    folder.mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    config = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 40,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("change", ["text.width=32", "text.layers=1", "text.vocab_size=41", "text.pool=pooler"])
def test_weights_of_another_architecture_are_refused(folder, tmp_path, change):
    golden = np.load(GOLDEN)
    weights = {k.removeprefix("query/weight/"): golden[k] for k in golden if k.startswith("query/weight/")}
    config = settings(folder, model_overrides=f"{GOLDEN_MODEL},{change}")
    state = run.initial_state(config, oracle.mesh_of(1))
    with pytest.raises(ValueError, match=r"expected text\.|expected .*pooler|no tensor|lacks"):
        initialize_pair(hugging_face_folder(tmp_path / "bert", weights), read_text_pair(config), state)


def test_a_run_evaluates_and_resumes(folder, tmp_path):
    changes = {"optimizer.schedule": "constant", "text_retrieval.query_length": 16, "eval_every": 2, "checkpoint_every": 2}
    infcl_jax.train(settings(folder, **changes), tmp_path / "a")
    resumed = infcl_jax.train(settings(folder, **changes, total_steps=4), tmp_path / "a")
    straight = infcl_jax.train(settings(folder, **changes, total_steps=4), tmp_path / "b")
    assert resumed == straight and resumed.keys() == {"text_retrieval/top20", "text_retrieval/top100"}


def test_judgments_give_mrr_and_recall(folder, tmp_path):
    (tmp_path / "queries.tsv").write_text("".join(f"q{i}\tquery {i}\n" for i in range(3)))
    (tmp_path / "qrels.tsv").write_text("q0 0 7 1\nq0 0 8 1\nq1 0 3 1\n")
    suite = run.evaluation_suite(
        settings(
            folder,
            **{
                "text_retrieval.questions": str(tmp_path / "queries.tsv"),
                "text_retrieval.judgments": str(tmp_path / "qrels.tsv"),
            },
        ),
        oracle.mesh_of(1),
    )
    row = np.array([[1, 7, 2, *range(20, 30)], [*range(50, 62), 3], [0] * 13])
    assert suite.metrics(row) == {"mrr10": (1 / 2 + 0) / 2, "recall1000": (1 / 2 + 1) / 2}


def test_search_is_exact_for_any_block_and_device_count(folder):
    config = settings(folder)
    suite, state, row = accuracy(config)
    for block, devices in ((7, 1), (96, 4)):
        other = dataclasses.replace(suite, block=block, mesh=oracle.mesh_of(devices))
        np.testing.assert_array_equal(other.search(jax.device_get(state.variables)), row)


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("New York", "in new york.", True),
        ("York", "New Yorker", False),
        ("U.S.", "the u.s. is", True),
        ("caf\u00e9", "CAFE\u0301!", True),
        ("cafe", "caf\u00e9", False),
        ("snake_case", "a snake _ case", True),
        ("\u65e5\u672c", "\u65e5\u672c", True),
        ("", "anything", False),
        ("1,000", "1 , 000 people", True),
    ],
)
def test_answers_match_as_tokens(answer, text, expected):
    assert has_answer([answer], text) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "clip"}, "expected loss='retrieval'"),
        ({"model": "tiny", "model_overrides": ""}, "expected a BERT"),
        ({"text_retrieval.questions": None}, "together"),
        ({"frozen": ("text",)}, "expected frozen"),
        ({"export": True}, "expected export"),
        ({"grad_cache.chunk_size": 4, "grad_cache.residency": "replay"}, "residency"),
        ({"grad_cache.passage_chunk_size": 4}, "expected grad_cache.chunk_size"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(folder, **changes)


def accuracy(config, **training):
    state, _ = trained(config, **training)
    suite = run.evaluation_suite(config, oracle.mesh_of(1))
    return suite, state, suite.search(state.variables)


def test_hit_accuracy_is_that_of_numpy(folder):
    config = settings(folder)
    suite, state, row = accuracy(config)
    apply, texts = state.apply_fn, suite.texts
    query = apply(state.variables, texts.queries([q.text for q in suite.questions]), method="encode_query")
    passages = [suite.corpus[i] for i in range(len(suite.corpus))]
    passage = apply(state.variables, texts.passages(passages), method="encode_passage")
    scores = np.asarray(query, np.float64) @ np.asarray(passage, np.float64).T
    expected = np.argsort(-scores, axis=1, kind="stable")
    metrics = suite(state.variables)
    for k in (20, 100):
        hits = [
            any(has_answer(question.answers, passages[i].text) for i in order[:k])
            for question, order in zip(suite.questions, expected, strict=True)
        ]
        assert metrics[f"text_retrieval/top{k}"] == np.mean(hits)
    found = np.take_along_axis(scores, row, 1)
    np.testing.assert_allclose(found, -np.sort(-scores, axis=1)[:, : row.shape[1]], rtol=1e-5, atol=1e-6)


def test_hard_negatives_raise_accuracy(folder):
    rates = []
    for negatives in (0, 1):
        config = settings(
            folder,
            **{
                "text_retrieval.hard_negatives": negatives,
                "optimizer.learning_rate": 2e-3,
                "total_steps": 120,
            },
        )
        _, _, row = accuracy(config)
        rates.append(np.mean([rows[0] == 2 * topic for topic, rows in enumerate(row)]))
    assert rates[1] > rates[0] + 0.1, rates
