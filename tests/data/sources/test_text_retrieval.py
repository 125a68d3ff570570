"""Sources of dense text retrieval in every layout, by offset."""

import json
import pickle

import numpy as np
import pytest

from infcl_jax.data import PairTexts, load_tokenizer
from infcl_jax.data.sources import text_records
from infcl_jax.data.sources.base import BadRecordError
from infcl_jax.data.sources.text_retrieval import (
    Corpus,
    Passage,
    QuerySource,
    Question,
    read_judgments,
    read_questions,
)

TRICKY = ['a "quoted" [text]', "back\\slash\\", 'ends with \\"', "{[", "naïve — 日本", "new\nline"]


def dpr(texts):
    return [
        {
            "question": text,
            "answers": ["x"],
            "positive_ctxs": [{"title": text, "text": text, "passage_id": str(i)}],
            "hard_negative_ctxs": [{"title": None, "text": "hard"}] if i % 2 else [],
            "negative_ctxs": [{"text": "random"}],
        }
        for i, text in enumerate(texts)
    ]


def tevatron(texts):
    return [
        {
            "query_id": str(i),
            "query": text,
            "positive_passages": [{"docid": str(i), "title": text, "text": text}],
            "negative_passages": [{"docid": "9", "title": "", "text": "hard" if i % 2 else "random"}],
        }
        for i, text in enumerate(texts)
    ]


def marco(texts):
    return [{"query": text, "pos": [text], "neg": ["hard" if i % 2 else "random"]} for i, text in enumerate(texts)]


@pytest.mark.parametrize("block", [7, 2**24])
@pytest.mark.parametrize("indent", [None, 4])
def test_objects_of_an_array_are_found_at_any_block_size(tmp_path, monkeypatch, block, indent):
    monkeypatch.setattr(text_records, "_BLOCK", block)
    (tmp_path / "train.json").write_text(json.dumps(dpr(TRICKY), indent=indent))
    records = text_records.RecordFile(tmp_path / "train.json")
    assert [records.json(i) for i in range(len(records))] == dpr(TRICKY)


@pytest.mark.parametrize("layout", [dpr, tevatron, marco])
def test_layouts_give_the_same_queries_and_passages(tmp_path, layout):
    path = tmp_path / "train.json"
    path.write_text(
        json.dumps(dpr(TRICKY)) if layout is dpr else "\n\n".join(json.dumps(r) for r in layout(TRICKY)) + "\r\n"
    )
    source = pickle.loads(pickle.dumps(QuerySource(path)))
    assert len(source) == len(TRICKY)
    for i, text in enumerate(TRICKY):
        example = source[i]
        assert (example.query, example.positives[0].text) == (text, text)
        assert [passage.text for passage in example.negatives] == ["hard" if i % 2 else "random"]
        if layout is not marco:
            assert example.positives[0] == Passage(text, text, str(i))


def test_offsets_take_a_fixed_number_of_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in marco(["x" * 5000] * 100)))
    state = pickle.dumps(QuerySource(tmp_path / "a.jsonl"))
    assert len(state) < 100 * 16 + 1000


@pytest.mark.parametrize("record", ['{"query": "a"}', '{"query": "a", "pos": []}', "[1", '"a"', '{"pos": ["a"]}'])
def test_damaged_records_are_named(tmp_path, record):
    (tmp_path / "a.jsonl").write_text('{"query": "a", "pos": ["b"]}\n' + record)
    with pytest.raises(BadRecordError, match=r"record 1 of .*a\.jsonl, split train"):
        QuerySource(tmp_path / "a.jsonl")[1]


def test_an_open_array_and_an_empty_file_are_refused(tmp_path):
    (tmp_path / "a.json").write_text('[{"question": "a"}')
    (tmp_path / "b.json").write_text("\n")
    with pytest.raises(ValueError, match="not closed"):
        QuerySource(tmp_path / "a.json")
    with pytest.raises(ValueError, match="expected records"):
        QuerySource(tmp_path / "b.json")


@pytest.mark.parametrize(
    "text",
    [
        'id\ttext\ttitle\n1\t"say ""hi"""\tT\n2\tplain\tU\n',
        '{"docid": "1", "text": "say \\"hi\\"", "title": "T"}\n{"docid": 2, "text": "plain", "title": "U"}\n',
    ],
)
def test_corpora(tmp_path, text):
    (tmp_path / "corpus").write_text(text)
    corpus = Corpus(tmp_path / "corpus")
    assert [corpus[i] for i in range(len(corpus))] == [Passage('say "hi"', "T", "1"), Passage("plain", "U", "2")]
    with pytest.raises(IndexError):
        corpus[2]


def test_a_collection_is_not_quoted(tmp_path):
    (tmp_path / "collection.tsv").write_text('0\t"half a quote\n1\tb\n')
    corpus = Corpus(tmp_path / "collection.tsv")
    assert [corpus[i] for i in range(2)] == [Passage('"half a quote', "", "0"), Passage("b", "", "1")]


def test_questions_and_judgments(tmp_path):
    (tmp_path / "qa.csv").write_text('who\t[\'a\', "b\'s"]\n"""who"""\t"[""d\'A""]"\r\n')
    (tmp_path / "queries.tsv").write_text('7\twho\n8\t"who" is\n')
    (tmp_path / "q.jsonl").write_text('{"query": "who", "_id": 7}\n')
    (tmp_path / "qrels").write_text("7 0 3 1\n7\t0\t4\t0\n7 0 5 2\n")
    assert read_questions(tmp_path / "qa.csv") == [
        Question("who", answers=("a", "b's")),
        Question('"who"', answers=("d'A",)),
    ]
    assert read_questions(tmp_path / "queries.tsv") == [Question("who", "7"), Question('"who" is', "8")]
    assert read_questions(tmp_path / "q.jsonl") == [Question("who", "7")]
    assert read_judgments(tmp_path / "qrels") == {"7": {"3", "5"}}
    np.testing.assert_raises(ValueError, read_judgments, tmp_path / "qa.csv")


@pytest.mark.parametrize(
    "name,line,match",
    [
        ("a.jsonl", b'{"query": "a", "answers": 3}', "expected a list of answers, got int"),
        ("a.jsonl", b'{"answers": ["a"]}', "expected one of the fields"),
        ("a.jsonl", b'{"query": ' + b"[" * 100_000, "got one that is nested too deeply"),
        ("a.csv", b"a\t[" + b"(" * 300, "SyntaxError|MemoryError"),
        ("a.csv", b"a\t[b]", "malformed"),
        ("a.csv", b"a\xff\tb", "codec"),
        ("a.csv", b"a\t['\0']", "."),
    ],
)
def test_damaged_questions_are_named(tmp_path, name, line, match):
    first = b'{"query": "a"}' if name == "a.jsonl" else b"1\ta"
    (tmp_path / name).write_bytes(first + b"\n" + line)
    with pytest.raises(ValueError, match=rf"^line 2 of .*{name}: .*({match})"):
        read_questions(tmp_path / name)


@pytest.mark.parametrize("line", [b"7 0 3", b"7 0 3 yes", b"7 0 \xff 1", b"7 0 3 " + b"1" * 5000])
def test_damaged_judgments_are_named(tmp_path, line):
    (tmp_path / "qrels").write_bytes(b"7 0 3 1\n" + line)
    with pytest.raises(ValueError, match=r"^expected four columns in line 2 of .*qrels, got "):
        read_judgments(tmp_path / "qrels")


def test_huge_records_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text_records, "_LARGEST", 100)
    (tmp_path / "a.jsonl").write_text('{"query": "a", "pos": ["b"]}\n{"query": "a", "pos": ["' + "b" * 100 + '"]}')
    with pytest.raises(BadRecordError, match=r"record 1 of .*: expected at most 100 bytes in record 1 of .*, got 127"):
        QuerySource(tmp_path / "a.jsonl")[1]


@pytest.mark.parametrize("line", [b"\n", b"\r\n", b" \n", b" \t\n"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\t"])
def test_blank_lines_are_skipped(tmp_path, line, end):
    (tmp_path / "a").write_bytes(line * 100_000 + b"a\n" + line + b" b" + end)
    records = text_records.RecordFile(tmp_path / "a")
    assert [records[i] for i in range(len(records))] == [b"a", b" b"]


def test_queries_are_cut_with_one_warning(caplog):
    texts = pickle.loads(pickle.dumps(PairTexts(load_tokenizer("bytes", 12), query_length=6)))
    for _ in range(2):
        assert texts.queries(["who wrote faust?"]).shape == (1, 6)
    assert texts.passages([Passage("b", "a")]).tolist() == texts.tokenizer(["a b"]).tolist()
    assert len(caplog.records) == 1
