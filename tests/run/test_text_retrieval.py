"""Dense text retrieval: runs on a corpus that the tests make."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs
from retrieval_runs import BATCH, MODEL, initial, settings, write_corpus
from safetensors.numpy import load_file, save_file

import infcl_jax
from infcl_jax import evaluate, run
from infcl_jax.models import build_model, variable_shapes
from infcl_jax.models.convert.text_pair import save_text_pair
from infcl_jax.run.base import make_run
from infcl_jax.run.initialize import initialize_pair
from infcl_jax.runtime import progress
from infcl_jax.runtime.mesh import replicate, shard_batch
from infcl_jax.training import make_train_step, restore_variables


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("dpr"))


def trained(config, devices=1, state=None):
    """Train a run in this process and return its state and its first loss."""
    mesh = oracle.mesh_of(devices)
    source = run.training_source(config)
    step = make_train_step(run.loss(config, mesh, source), config.seed, run.workload(config, devices).cache, mesh)
    state, first = run.initial_state(config, mesh, source) if state is None else replicate(mesh, state), None
    data = run.training_data(config, source, mesh=mesh)
    try:
        for _ in range(config.total_steps):
            state, metrics = step(state, run.next_batch(config, data, mesh))
            first = metrics["loss"] if first is None else first
    finally:
        data.close()
    return state, float(first)


SLOW, FULL = pytest.mark.slow, pytest.mark.full
CHUNKS = [(1, 1, 1), (8, 16, 8), (4, None, 1), (BATCH, 2 * BATCH, 1)]  # of queries and passages, devices


@pytest.mark.parametrize(
    ("tied", "chunks"),
    [(False, CHUNKS[:2]), pytest.param(True, CHUNKS[1:3], marks=SLOW), pytest.param(False, CHUNKS[2:], marks=FULL)],
)
def test_chunks_and_devices_do_not_change_the_parameters(folder, tied, chunks):
    state = initial(f"{MODEL},tied={tied}")
    (whole, loss) = trained(settings(folder), state=state)
    assert set(whole.params) == ({"text"} if tied else {"query", "passage"})
    change = jax.tree.map(lambda a, b: np.abs(a - b).max(), whole.params, state.params)
    assert max(jax.tree.leaves(change)) > 0.01  # the tolerance below is far below the steps
    for query, passage, devices in chunks:
        cache = {"grad_cache.chunk_size": query, "grad_cache.passage_chunk_size": passage}
        other, value = trained(settings(folder, **cache), devices, state)
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), other.params, whole.params)


def test_the_loss_is_that_of_the_function_without_missing_negatives(folder):
    config, mesh, state = settings(folder, **{"text_retrieval.hard_negatives": 2}), oracle.mesh_of(1), initial(MODEL)
    data = run.training_data(config, run.training_source(config), mesh=mesh)
    batch = run.next_batch(config, data, mesh)
    data.close()
    assert runs.token_ids(batch["passage"]).shape == (3 * BATCH, 24)
    mask = np.asarray(batch["passage_mask"]).reshape(BATCH, 3)
    assert mask[:, 0].all() and not mask[:, 2].any()
    output = jax.jit(state.apply_fn)(state.variables, batch["query"], batch["passage"])
    result = run.loss(config, mesh)(output, passage_mask=batch["passage_mask"])
    rows = np.flatnonzero(mask.ravel())
    labels = np.searchsorted(rows, np.arange(BATCH) * 3)
    scores = np.asarray(output.query, np.float64) @ np.asarray(output.passage[rows], np.float64).T
    expected = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(BATCH), labels])
    np.testing.assert_allclose(result.value, expected, rtol=1e-6)


GOLDEN = Path(__file__).parents[1] / "golden" / "grad_cache.npz"
GOLDEN_MODEL = (
    "text.width=16,text.layers=2,text.heads=2,text.vocab_size=40,text.max_positions=16,text.context_length=12,"
    "text.pool=cls"
)

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 40,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
}


@functools.cache
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


def tensors(prefix):
    return {name.removeprefix(prefix): array for name, array in golden().items() if name.startswith(prefix)}


@functools.cache
def golden_state(folder):
    """State on the host with the golden weights, for a learning rate of 1."""
    model = make_run(settings(folder, model_overrides=GOLDEN_MODEL)).model_config
    state = initial(GOLDEN_MODEL, 5, learning_rate=1.0)
    placed, params = replicate(oracle.mesh_of(1), state), dict(state.params)
    for name in params:
        path = hugging_face_folder(folder / name, tensors(f"{name}/weight/"))
        params[name] = jax.device_get(initialize_pair(path, model, placed).params[name])
    return state.replace(params=params)


@pytest.mark.parametrize("name", ["query", "passage"])
def test_features_are_those_of_transformers(folder, name):
    state = golden_state(folder)
    encode = jax.jit(state.apply_fn, static_argnames="method")
    feature = encode(state.variables, golden()[f"{name}/ids"], method=f"encode_{name}")
    np.testing.assert_allclose(feature, golden()[f"{name}/feature"], atol=1e-5)


def test_an_export_has_the_tensors_of_transformers(folder, tmp_path):
    state, model = (
        replicate(oracle.mesh_of(1), golden_state(folder)),
        make_run(settings(folder, model_overrides=GOLDEN_MODEL)).model_config,
    )
    save_text_pair(tmp_path, model, state.variables, {"query": 8, "passage": 12})
    for name in ("query", "passage"):
        expected, exported = tensors(f"{name}/weight/"), tmp_path / f"{name}_encoder"
        written = load_file(exported / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(np.array_equal(written[key], expected[key]) for key in expected)
        assert json.loads((exported / "config.json").read_text()).items() >= BERT.items()
        again = initialize_pair(str(exported), model, state).params[name]
        jax.tree.map(np.testing.assert_array_equal, again, state.params[name])


def test_the_tokenizer_is_that_of_the_weights(folder, tmp_path):
    path = hugging_face_folder(tmp_path / "bert", tensors("query/weight/"))
    with np.load(GOLDEN.with_name("transformers_tokens.npz")) as stored:
        (tmp_path / "bert/tokenizer.json").write_bytes(stored["bert_json"].tobytes())
    (tmp_path / "bert/config.json").write_text(json.dumps(BERT | {"vocab_size": 800}))
    overrides = GOLDEN_MODEL.replace("vocab_size=40", "vocab_size=800")
    changes = {"model": "bert-base-uncased", "model_overrides": overrides, "init.text": path}
    tokenizer = run.text_tokenizer(settings(folder, **changes))
    assert (tokenizer.kind, tokenizer.context_length) == ("hf", 12)


@pytest.mark.parametrize(
    ("devices", "query_chunk", "passage_chunk"),
    [(1, 2, 3), pytest.param(1, None, None, marks=SLOW), pytest.param(5, 5, 5, marks=FULL)],
)
def test_loss_and_gradients_are_those_of_grad_cache(folder, tmp_path, devices, query_chunk, passage_chunk):
    chunks = {"grad_cache.chunk_size": query_chunk, "grad_cache.passage_chunk_size": passage_chunk}
    config, mesh = settings(folder, model_overrides=GOLDEN_MODEL, batch_size=5, **chunks), oracle.mesh_of(devices)
    batch = {name: golden()[f"{name}/ids"] for name in ("query", "passage")} | {"passage_mask": np.ones(10, bool)}
    batch = {name: shard_batch(mesh, array) for name, array in batch.items()}
    step = make_train_step(run.loss(config, mesh), 0, run.workload(config, devices).cache, mesh)
    before = golden_state(folder)
    after, metrics = step(replicate(mesh, before), batch)
    np.testing.assert_allclose(metrics["loss"], golden()["loss"], rtol=1e-5)
    gradients = jax.tree.map(lambda a, b: a - np.asarray(b), before.params, after.params)
    for name in ("query", "passage"):
        path = hugging_face_folder(tmp_path / name, tensors(f"{name}/gradient/"))
        expected = initialize_pair(path, make_run(config).model_config, after).params[name]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients[name], expected)


def hugging_face_folder(folder, tensors):
    """Write a BERT as transformers saves it."""
    folder.mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(BERT))
    return str(folder)


@pytest.mark.parametrize("change", ["text.width=32", "text.layers=1", "text.vocab_size=41", "text.pool=pooler"])
def test_weights_of_another_architecture_are_refused(folder, tmp_path, change):
    config, path = settings(folder, model_overrides=f"{GOLDEN_MODEL},{change}"), tmp_path / "bert"
    message = "without pooler.dense.bias" if "pooler" in change else f"expected {change.partition('=')[0]}="
    with pytest.raises(ValueError, match=message):
        initialize_pair(hugging_face_folder(path, tensors("query/weight/")), make_run(config).model_config, None)


def test_all_fields_of_another_architecture_are_listed(folder, tmp_path):
    path = hugging_face_folder(tmp_path / "bert", tensors("query/weight/"))
    changes = {"model": "bert-base-uncased", "model_overrides": "text.context_length=512", "init.text": path}
    config = settings(folder, **changes)
    with pytest.raises(ValueError, match=r"^expected text\.width=.*; add --config\.model_overrides=") as error:
        run.text_tokenizer(config)  # the first part of a run that opens the folder
    overrides = str(error.value).partition("model_overrides=")[2].partition(", or")[0]
    model = make_run(dataclasses.replace(config, model_overrides=overrides)).model_config
    state = initialize_pair(path, model, replicate(oracle.mesh_of(1), initial(GOLDEN_MODEL, 5)))
    assert state.params["query"]["token_embedding"].shape == (BERT["vocab_size"], BERT["hidden_size"])


def test_queries_longer_than_the_context_are_refused(folder):
    config = settings(folder, **{"text_retrieval.query_length": 25})
    with pytest.raises(ValueError, match=r"expected text_retrieval.query_length <= text.context_length=24, got 25"):
        run.training_data(config, run.training_source(config), mesh=oracle.mesh_of(1))


@pytest.mark.parametrize("tied", [False, True])
def test_one_bert_initializes_both_encoders_but_no_projection(folder, tmp_path, tied):
    overrides = f"{GOLDEN_MODEL},text.projection=linear,embed_dim=8,tied={tied}"
    model = make_run(settings(folder, model_overrides=overrides)).model_config
    params = jax.tree.map(lambda x: jnp.ones(x.shape), variable_shapes(build_model(model))["params"])
    path = hugging_face_folder(tmp_path / "bert", tensors("query/weight/"))
    result = initialize_pair(path, model, initial(GOLDEN_MODEL, 5).replace(params=params)).params
    assert set(result) == ({"text"} if tied else {"query", "passage"})
    for tower in result.values():
        embedding = golden()["query/weight/embeddings.word_embeddings.weight"]
        np.testing.assert_array_equal(tower["token_embedding"], embedding)
        np.testing.assert_array_equal(tower["text_projection"]["kernel"], 1)
        assert not (tower["transformer"]["block_01"]["mlp"]["c_fc"]["kernel"] == 1).any()


@SLOW
def test_a_run_evaluates_and_resumes(folder, tmp_path):
    changes = {"optimizer.schedule": "constant", "text_retrieval.query_length": 16}
    changes |= {"eval_every": 2, "checkpoint_every": 2}
    infcl_jax.train(settings(folder, **changes), tmp_path / "a")
    resumed = infcl_jax.train(settings(folder, **changes, total_steps=4), tmp_path / "a")
    straight = infcl_jax.train(settings(folder, **changes, total_steps=4), tmp_path / "b")
    assert evaluate(tmp_path / "a") == straight
    suite = run.evaluation_suite(run.saved_config(tmp_path / "a"), oracle.mesh_of(1))
    _, variables = restore_variables(tmp_path / "a", variable_shapes(suite.model))
    hits = suite.metrics(suite.search(variables))
    assert {f"text_retrieval/{name}": value for name, value in hits.items()} == straight
    encoder = infcl_jax.load(tmp_path / "a")
    queries = [question.text for question in suite.questions]
    scores = encoder.encode_queries(queries) @ encoder.encode_passages(list(suite.corpus)).T
    assert np.mean(scores.argmax(1) == suite.search(variables)[:, 0]) > 0.9  # but for ties
    assert resumed == straight and resumed.keys() == {"text_retrieval/top20", "text_retrieval/top100"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "clip"}, "expected loss='retrieval'"),
        ({"model": "tiny", "model_overrides": ""}, "expected a BERT"),
        ({"text_retrieval.questions": None}, "together"),
        ({"frozen": ("text",)}, "expected frozen"),
        ({"export": True}, "expected export"),
        ({"grad_cache.chunk_size": 4, "grad_cache.offload": "replay"}, "offload"),
        ({"grad_cache.passage_chunk_size": 4}, "expected grad_cache.chunk_size"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(folder, **changes)


@SLOW
def test_hard_negatives_raise_accuracy(folder):
    rates = []
    for negatives in (0, 1):
        changes = {"text_retrieval.hard_negatives": negatives, "optimizer.learning_rate": 2e-3, "total_steps": 120}
        config = settings(folder, **changes)
        row = run.evaluation_suite(config, oracle.mesh_of(1)).search(trained(config)[0].variables)
        rates.append(np.mean([rows[0] == 2 * topic for topic, rows in enumerate(row)]))
    assert rates[1] > rates[0] + 0.1, rates


def test_an_evaluation_says_how_far_it_is(folder, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    config, mesh, lines = settings(folder), oracle.mesh_of(1), []
    suite = dataclasses.replace(run.evaluation_suite(config, mesh, say=lines.append), block=40)
    suite.search(run.initial_state(config, mesh).evaluated_variables)
    assert [line.split(" passages")[0] for line in lines] == [f"{suite.corpus.name}: {n} of 96" for n in (40, 80, 96)]
