"""Evaluation of dense text retrieval against NumPy."""

import dataclasses
import functools
import json

import jax
import numpy as np
import oracle
import pytest
from retrieval_runs import MODEL, initial, settings, write_corpus

from infcl_jax import run
from infcl_jax.evaluation import text_retrieval
from infcl_jax.evaluation.text_retrieval import has_answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("dpr"))


@functools.cache
def large_suite(folder):
    """A suite over 1,100 passages whose questions have answers and judgments."""
    rng = np.random.default_rng(1)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, 3)) for _ in range(200)]
    corpus = [" ".join(rng.choice(words, 4)) for _ in range(1100)]
    (folder / "large.tsv").write_text("".join(f"p{i}\t{text}\n" for i, text in enumerate(corpus)))
    questions = [{"_id": f"q{i}", "query": f"{words[i]}?", "answers": [words[i], words[-i]]} for i in range(9)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    judged = [f"q{i} 0 p{j} {grade}" for i in range(8) for grade in (0, 1) for j in rng.integers(0, 1100, 20)]
    (folder / "qrels").write_text("\n".join(judged))
    names = {"corpus": "large.tsv", "questions": "questions.jsonl", "judgments": "qrels"}
    changes = {f"text_retrieval.{name}": str(folder / file) for name, file in names.items()}
    return run.evaluation_suite(settings(folder, **changes), oracle.mesh_of(1))


def test_metrics_are_those_of_numpy(folder):
    suite, state = large_suite(folder), initial(MODEL)
    encode = jax.jit(state.apply_fn, static_argnames="method")
    passages, questions = [suite.corpus[i] for i in range(len(suite.corpus))], suite.questions
    query = encode(state.variables, suite.texts.queries([q.text for q in questions]), method="encode_query")
    passage = encode(state.variables, suite.texts.passages(passages), method="encode_passage")
    scores = np.asarray(query, np.float64) @ np.asarray(passage, np.float64).T
    order = np.argsort(-scores, axis=1, kind="stable")
    np.testing.assert_array_equal(suite.search(state.variables), order[:, :1000])
    hit = np.array([[has_answer(q.answers, p.text) for p in passages] for q in questions])
    hit = np.take_along_axis(hit, order, 1)
    relevant = np.array([[p.key in suite.judgments.get(q.key, ()) for p in passages] for q in questions])[:8]
    relevant = np.take_along_axis(relevant, order[:8], 1)
    rank = np.argmax(relevant, 1) + 1
    expected = {f"top{k}": np.mean(hit[:, :k].any(1)) for k in (20, 100)}
    expected |= {"mrr10": np.mean(np.where(rank <= 10, 1 / rank, 0))}
    expected |= {"recall1000": np.mean(relevant[:, :1000].sum(1) / relevant.sum(1))}
    metrics = suite(state.variables)
    assert metrics == pytest.approx({f"text_retrieval/{name}": value for name, value in expected.items()}, abs=1e-12)
    assert all(0 < value < 1 for value in metrics.values()), metrics


@pytest.mark.parametrize(("block", "devices"), [(300, 1), (700, 8)])
def test_search_is_exact_for_any_block_and_device_count(folder, monkeypatch, block, devices):
    suite, variables, blocks = large_suite(folder), initial(MODEL).variables, []

    def recorded(query, passage, *arguments):
        blocks.append(np.asarray(query, np.float64) @ np.asarray(passage, np.float64).T)
        return dot_product_top_k(query, passage, *arguments)

    dot_product_top_k = text_retrieval.dot_product_top_k
    monkeypatch.setattr(text_retrieval, "dot_product_top_k", recorded)
    other = dataclasses.replace(suite, block=block, mesh=oracle.mesh_of(devices))
    rows = other.search(variables)
    scores = np.concatenate(blocks, axis=1)
    # Features depend on the devices by rounding, so nearly equal scores may be in another order than on one device.
    expected = -np.sort(-scores, axis=1)[:, :1000]
    np.testing.assert_allclose(np.take_along_axis(scores, rows, 1), expected, rtol=0, atol=1e-6 * scores.max())
    assert all(len(set(row)) == 1000 for row in rows.tolist())
    assert max(b.shape[1] for b in blocks) == block and scores.shape[1] == 1100


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


def test_questions_without_answers_need_judgments(folder, tmp_path):
    (tmp_path / "queries.tsv").write_text("q0\twho?\n")
    (tmp_path / "qrels").write_text("q1 0 3 1\n")
    files = {"text_retrieval.questions": str(tmp_path / "queries.tsv")}
    for judgments in (None, str(tmp_path / "qrels")):
        config = settings(folder, **files, **{"text_retrieval.judgments": judgments})
        with pytest.raises(ValueError, match=r"expected answers in .*queries\.tsv, or judgments of its queries"):
            run.evaluation_suite(config, oracle.mesh_of(1))
