"""Evaluation of dense text retrieval against NumPy."""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import numpy as np
import oracle
import pytest
from retrieval_runs import settings, write_corpus

from infcl_jax import run
from infcl_jax.data import Corpus, Question
from infcl_jax.evaluation import TextRetrievalSuite, text_retrieval
from infcl_jax.evaluation.text_retrieval import has_answer

GOLDEN = Path(__file__).parents[1] / "golden" / "retrieval" / "scores.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("dpr"))


class Bags(nn.Module):
    """Sums of the embeddings of bytes; it compiles fast."""

    def setup(self):
        self.embed = nn.Embed(300, 16)

    def encode_query(self, ids):
        return self.embed(ids).sum(axis=1)

    encode_passage = encode_query


VARIABLES = {"params": {"embed": {"embedding": np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)}}}


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
    return dataclasses.replace(run.evaluation_suite(settings(folder, **changes), oracle.mesh_of(1)), model=Bags())


def test_metrics_are_those_of_numpy(folder):
    suite, table = large_suite(folder), VARIABLES["params"]["embed"]["embedding"].astype(np.float64)
    passages, questions = [suite.corpus[i] for i in range(len(suite.corpus))], suite.questions
    query = table[suite.texts.queries([q.text for q in questions])].sum(axis=1)
    scores = query @ table[suite.texts.passages(passages)].sum(axis=1).T
    order = np.argsort(-scores, axis=1, kind="stable")
    np.testing.assert_array_equal(suite.search(VARIABLES), order[:, :1000])
    hit = np.array([[has_answer(q.answers, p.text) for p in passages] for q in questions])
    hit = np.take_along_axis(hit, order, 1)
    relevant = np.array([[p.key in suite.judgments.get(q.key, ()) for p in passages] for q in questions])[:8]
    relevant = np.take_along_axis(relevant, order[:8], 1)
    rank = np.argmax(relevant, 1) + 1
    expected = {f"top{k}": np.mean(hit[:, :k].any(1)) for k in (20, 100)}
    expected |= {"mrr10": np.mean(np.where(rank <= 10, 1 / rank, 0))}
    expected |= {"recall1000": np.mean(relevant[:, :1000].sum(1) / relevant.sum(1))}
    metrics = suite(VARIABLES)
    assert metrics == pytest.approx({f"text_retrieval/{name}": value for name, value in expected.items()}, abs=1e-12)
    assert all(0 < value < 1 for value in metrics.values()), metrics


@pytest.mark.parametrize(("block", "devices"), [(300, 1), (700, 8)])
def test_search_is_exact_for_any_block_and_device_count(folder, monkeypatch, block, devices):
    suite, blocks = large_suite(folder), []

    def recorded(query, passage, *arguments):
        blocks.append(np.asarray(query, np.float64) @ np.asarray(passage, np.float64).T)
        return dot_product_top_k(query, passage, *arguments)

    dot_product_top_k = text_retrieval.dot_product_top_k
    monkeypatch.setattr(text_retrieval, "dot_product_top_k", recorded)
    other = dataclasses.replace(suite, block=block, mesh=oracle.mesh_of(devices))
    rows = other.search(VARIABLES)
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
    for judgments, ids in ((None, ""), (str(tmp_path / "qrels"), "'q1' in the judgments and 'q0' in the queries")):
        config = settings(folder, **files, **{"text_retrieval.judgments": judgments})
        with pytest.raises(
            ValueError, match=rf"expected answers in .*queries\.tsv, or judgments of its queries.*{ids}"
        ):
            run.evaluation_suite(config, oracle.mesh_of(1))


def judged(tmp_path, documents, questions, judgments):
    """A suite without a model over passages that share the ids of their documents."""
    (tmp_path / "corpus.tsv").write_text("".join(f"{key}\ttext {i}\n" for i, key in enumerate(documents)))
    return TextRetrievalSuite(None, None, None, Corpus(tmp_path / "corpus.tsv"), questions, judgments)


def test_scores_of_documents_are_those_of_pytrec_eval(tmp_path):
    content = json.loads(GOLDEN.read_text())
    judgments = {query: {d for d, grade in row.items() if grade} for query, row in content["judgments"].items()}
    questions = [Question(query, query) for query in content["rankings"]]
    suite = judged(tmp_path, content["documents"], questions, judgments)
    metrics = suite.metrics(np.array(list(content["rankings"].values())))
    scores = content["scores"]
    assert metrics == pytest.approx({"mrr10": scores["recip_rank"], "recall1000": scores["recall_1000"]}, abs=1e-12)


def test_chunks_of_a_document_count_once(tmp_path):
    suite = judged(tmp_path, ["a", "b", "b", "b", "c"], [Question("q", "q")], {"q": {"b", "c"}})
    assert suite.metrics(np.array([[0, 3, 2, 1]])) == {"mrr10": 0.5, "recall1000": 0.5}
    assert suite.metrics(np.array([[0, 3, 2, 1, 4]])) == {"mrr10": 0.5, "recall1000": 1.0}


@pytest.mark.parametrize(("block", "spread"), [(700, 1), (2**17, 900)])  # rows between the chunks of a document
def test_the_recall_is_cut_at_documents(tmp_path, monkeypatch, block, spread):
    """Every document is relevant, and the passages are in the order of their scores."""
    monkeypatch.setattr(text_retrieval, "RECALL", 400)
    documents = [f"d{i // 3}" if spread == 1 else f"d{i % 900}" for i in range(2700)]
    suite = judged(tmp_path, documents, [Question("q", "q")], {"q": {f"d{i}" for i in range(900)}})
    feature = {"query": np.ones((1, 1)), "passage": np.linspace(1, 0.1, 2700)[:, None]}

    def encode(self, name, variables, tokenize, texts):
        start = 0 if name == "query" else int(texts[0].text.split()[1])
        return feature[name][start : start + len(texts)]

    monkeypatch.setattr(TextRetrievalSuite, "_encode", encode)
    texts = SimpleNamespace(queries=None, passages=None)
    suite = dataclasses.replace(suite, texts=texts, block=block, mesh=oracle.mesh_of(1))
    rows = suite.search(None)
    assert rows.tolist() == [list(range(1198 if spread == 1 else 400))]
    assert suite.metrics(rows)["recall400"] == pytest.approx(400 / 900)


def test_passages_without_ids_are_documents_of_their_own(tmp_path):
    suite = judged(tmp_path, ["", "", "a"], [Question("q", "q")], {"q": {"a"}})
    assert suite.metrics(np.array([[0, 1, 2]]))["mrr10"] == pytest.approx(1 / 3)


def test_missing_queries_and_passages_are_counted_in_one_line(tmp_path, caplog):
    judgments = {"q": {"a", "x"}, "r": {"a"}, "s": {"a"}}
    suite = judged(tmp_path, ["a", "b"], [Question("q", "q"), Question("other")], judgments)
    for _ in range(2):
        assert suite.metrics(np.array([[1, 0], [1, 0]])) == {"mrr10": 0.5, "recall1000": 0.5}
    (record,) = caplog.records
    assert record.getMessage() == (
        "2 of 3 judged queries of the judgments are not in the questions and not counted; 1 of 2 judged passages are "
        f"not in {suite.corpus.name} and count as not found"
    )


@pytest.mark.parametrize(
    ("questions", "judgments", "message"),
    [
        (
            [Question("q", "q")],
            {"q": {"x"}},
            "expected the passages of the judgments in .*, got none of 1, such as 'x'",
        ),
        ([Question("q", "q")], {"r": {"a"}}, "expected answers in the questions, or judgments of its queries"),
        ([Question("q")], None, "expected answers in the questions, or judgments of its queries"),
        ([], {"r": {"a"}}, "expected answers in the questions, or judgments of its queries"),
        ([Question("q", "q", ("a",))], {"r": {"a"}}, "expected judgments of the queries of the questions"),
    ],
)
def test_judgments_of_other_data_are_refused(tmp_path, questions, judgments, message):
    suite = judged(tmp_path, ["a", "b"], questions, judgments)
    for score in (suite.check_inputs, lambda: suite.metrics(np.zeros((len(questions), 1), int))):
        with pytest.raises(ValueError, match=message):
            score()


def test_only_questions_with_answers_count_in_the_accuracy(tmp_path):
    questions = [Question("q", answers=("text",)), Question("r"), Question("s", answers=("nothing",))]
    suite = judged(tmp_path, ["a"], questions, None)
    assert suite.metrics(np.zeros((3, 1), int)) == {"top20": 0.5, "top100": 0.5}
