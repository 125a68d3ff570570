"""Sources of dense text retrieval in every layout, by offset."""

import gzip
import json
import pickle
from pathlib import Path

import pytest

from infcl_jax.data import PairTexts, load_tokenizer, pair_iterator
from infcl_jax.data.sources import text_records
from infcl_jax.data.sources.base import BadRecordError
from infcl_jax.data.sources.text_records import Passage
from infcl_jax.data.sources.text_retrieval import Corpus, QuerySource
from infcl_jax.data.text_pairs import LEFT_OUT

GOLDEN = Path(__file__).parents[2] / "golden" / "retrieval"
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


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"query": "a"}', "expected a positive passage"),
        ('{"query": "a", "pos": []}', "expected a positive passage"),
        ('{"query": "a", "pos": null}', "expected a positive passage"),
        ("[1", "JSON"),
        ('"a"', "JSON object"),
        ('{"pos": ["a"]}', "expected one of the fields question, query, anchor, got pos"),
        ('{"query": null, "pos": ["a"]}', "null in query"),
        ('{"query": NaN, "pos": ["a"]}', "null in query"),
        ('{"query": " ", "pos": ["a"]}', "a text in query, got a blank one"),
        ('{"query": ["a"], "pos": ["a"]}', "a text in query, got a list"),
        ('{"query": "a", "pos": {"text": "b"}}', "a list in pos, got an object"),
        ('{"query": "a", "pos": 7}', "a list in pos, got a number"),
        ('{"query": "a", "pos": [null]}', "a text in pos, got null"),
        ('{"query": "a", "pos": [7]}', "a text in pos, got a number"),
        ('{"query": "a", "pos": [["b"]]}', "a text in pos, got a list"),
        ('{"query": "a", "pos": [""]}', "a blank one"),
        ('{"query": "a", "pos": [{"text": null}]}', "null in text"),
        ('{"query": "a", "pos": [{"title": "b"}]}', "expected one of the fields text"),
        ('{"query": "a", "pos": [{"text": "b", "title": ["c"]}]}', "a text in title, got a list"),
        ('{"query": "a", "pos": [{"text": "b", "id": {}}]}', "a text in id, got an object"),
        ('{"query": "a", "pos": ["b"], "neg": {"bm25": ["c"]}}', "a list in neg, got an object"),
        ('{"query": "a", "pos": ["b"], "neg": ["c", null]}', "a text in neg, got null"),
        ('{"anchor": "a", "positive": "b", "label": 0}', "got label"),
    ],
)
def test_damaged_records_are_named(tmp_path, record, message):
    (tmp_path / "a.jsonl").write_text('{"query": "a", "pos": ["b"]}\n' + record)
    with pytest.raises(BadRecordError, match=rf"record 1 of .*a\.jsonl, split train.*{message}"):
        QuerySource(tmp_path / "a.jsonl")[1]


@pytest.mark.parametrize(
    ("fields", "positives", "negatives"),
    [
        ({"pos": "red cat", "neg": "blue dog"}, ["red cat"], ["blue dog"]),
        (
            {"positive_ctxs": "red cat", "hard_negative_ctxs": [], "negative_ctxs": "blue dog"},
            ["red cat"],
            ["blue dog"],
        ),
        ({"pos": ["a"], "neg": None}, ["a"], []),
        ({"pos": ["a"], "neg": float("nan")}, ["a"], []),
        ({"pos": ["a"], "neg": None, "negatives": ["b"]}, ["a"], ["b"]),
        ({"pos": None, "positives": ["a", {"contents": "b"}]}, ["a", "b"], []),
        ({"positive": "a", "negative_1": "b", "negative_2": None, "negative_3": "c"}, ["a"], ["b", "c"]),
    ],
)
def test_a_string_is_one_passage_and_null_is_none(tmp_path, fields, positives, negatives):
    (tmp_path / "a.jsonl").write_text(json.dumps({"query": "q"} | fields))
    example = QuerySource(tmp_path / "a.jsonl")[0]
    assert [[p.text for p in passages] for passages in example[1:3]] == [positives, negatives]


@pytest.mark.parametrize(
    ("positive", "negative", "same"),
    [
        ("a", "a", True),
        ("a", {"text": "a", "title": ""}, True),
        ({"text": "a", "id": 7}, {"text": "b", "id": 7.0}, True),
        ({"text": "a", "title": "t"}, {"text": "a", "title": "u"}, False),
        ({"text": "a", "id": ""}, {"text": "b", "id": ""}, False),
    ],
)
def test_positives_leave_the_negatives_of_their_query(tmp_path, positive, negative, same):
    record = {"query": "q", "pos": ["other", positive], "neg": ["c", negative]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    source = QuerySource(tmp_path / "a.jsonl")
    assert (len(source[0].negatives), source[0].left_out) == ((1, 1) if same else (2, 0))
    texts = PairTexts(load_tokenizer("bytes", 8))
    data = pair_iterator(source, texts, batch_size=1, hard_negatives=2, seed=0, num_workers=0)
    assert next(data)["passage_mask"].tolist() == [True, True, not same]
    assert data.stats()[LEFT_OUT] == same
    data.close()


@pytest.mark.parametrize("layout", [dpr, marco])
def test_a_byte_order_mark_is_skipped(tmp_path, layout):
    text = json.dumps(dpr(TRICKY), indent=1) if layout is dpr else "\n".join(map(json.dumps, marco(TRICKY)))
    (tmp_path / "a").write_text(text, encoding="utf-8-sig")
    source = QuerySource(tmp_path / "a")
    assert [source[i].query for i in range(len(source))] == TRICKY
    (tmp_path / "a").write_text(text, encoding="utf-16")
    with pytest.raises(ValueError, match=r"expected a file in UTF-8, got UTF-16 in .*a; convert it"):
        QuerySource(tmp_path / "a")


def test_files_of_other_libraries():
    triplets = QuerySource(GOLDEN / "sentence_transformers_triplet.jsonl")
    tuples = QuerySource(GOLDEN / "sentence_transformers_n-tuple.jsonl")
    assert [x.text for i in range(2) for x in triplets[i].negatives] == [x.text for x in tuples[0].negatives]
    assert {x.positives for x in (*triplets, tuples[0])} == {(Passage("about word0"),), (Passage("about word1"),)}
    for name in ("pair", "list"):
        with pytest.raises(BadRecordError, match="got label"):
            QuerySource(GOLDEN / f"sentence_transformers_labeled-{name}.jsonl")[0]
    nulls = QuerySource(GOLDEN / "datasets.jsonl")
    assert [(nulls[i].positives[0].text, len(nulls[i].negatives)) for i in range(3)] == [("b", 1), ("e", 0), ("h", 0)]
    with pytest.raises(BadRecordError, match="null in query"):
        nulls[3]
    assert list(Corpus(GOLDEN / "beir_corpus.jsonl"))[:2] == [
        Passage("", "Title 0", "d0"),
        Passage("text of word1", "Title 1", "d1"),
    ]


def test_a_missing_file_names_the_setting(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a file of queries .*a\.jsonl; set dataset"):
        QuerySource(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'["a", {"query": "b"}]', "expected a JSON array of objects in .*, got 1 among 2 elements"),
        ("a.json", b'[{"query": "b, [c]"}, 7]', "got 1 among 2 elements"),
        ("a.json", json.dumps(marco(["a"])[0], indent=2).encode(), "got JSON objects over several lines"),
        ("a.csv", b"query,pos\na,b\n", "expected JSON lines or a JSON array .*, got CSV; convert it"),
        ("a.tsv", b"a\tb\n", "got TSV"),
        ("a.txt", b"a\n", "got other text"),
        ("a.jsonl.gz", gzip.compress(b"a", mtime=0), "expected a text file in UTF-8, got gzip"),
        ("a.parquet", b"PAR1\x15\x04\x15", "got Parquet"),
        ("a.json", b'[{"question": "a"}', "not closed"),
        ("a.json", b"\n", "expected records"),
    ],
)
def test_other_formats_are_refused_when_opened(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        QuerySource(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        'id\ttext\ttitle\n1\t"say ""hi"""\tT\n2\tplain\tU\n',
        '{"docid": "1", "text": "say \\"hi\\"", "title": "T"}\n{"docid": 2, "text": "plain", "title": "U"}\n',
        '\ufeffpid\ttitle\tpassage\r\n1\tT\t"say ""hi"""\r\n2\tU\tplain',
        '\ufeff1\tsay "hi"\tT\n2\tplain\tU\n',
        'id\tbody\ttitle\ttext\n1\tlong\tT\t"say ""hi"""\n2\tlong\tU\tplain',
        'title\ttext\tid\nT\t"say ""hi"""\t1\n    \nU\tplain\t2',
        'Title\tDoc ID\tlanguage\tContents\nT\t1\ten\t"say ""hi"""\nU\t2\ten\tplain',
    ],
)
def test_corpora(tmp_path, text):
    (tmp_path / "corpus").write_text(text)
    corpus = Corpus(tmp_path / "corpus")
    assert [corpus[i] for i in range(len(corpus))] == [Passage('say "hi"', "T", "1"), Passage("plain", "U", "2")]
    assert list(corpus) == [corpus[0], corpus[1]]
    with pytest.raises(IndexError):
        corpus[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\turl\ttitle\tbody", "passage 0 of .*corpus: expected 2 or 3 columns \\(id, text, title\\), got 4"),
        ("1", "passage 0 of .*corpus: expected 2 or 3 columns"),
        ('id\ttext\ttitle\n1\t"open\tT', "passage 0 of .*corpus: expected the 3 columns of the header, got 2"),
        ('{"_id": 1, "text": null}', "passage 0 of .*corpus: .*null in text"),
        ("id\turl\n1\ta", "expected one of the columns text, .* in line 1 of .*corpus, got id, url"),
        ("id\ttext\n", "only a header"),
    ],
)
def test_damaged_corpora_are_named(tmp_path, text, message):
    (tmp_path / "corpus").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(Corpus(tmp_path / "corpus"))


def test_a_header_may_have_no_id(tmp_path):
    (tmp_path / "corpus").write_text("title\ttext\nT\ta\n")
    assert list(Corpus(tmp_path / "corpus")) == [Passage("a", "T")]
    (tmp_path / "corpus").write_text("docno\ttext\n7\ta\n")
    assert list(Corpus(tmp_path / "corpus")) == [Passage("a", "", "7")]


def test_a_collection_is_not_quoted(tmp_path):
    (tmp_path / "collection.tsv").write_text('0\t"half a quote\n1\tb\n')
    corpus = Corpus(tmp_path / "collection.tsv")
    assert [corpus[i] for i in range(2)] == [Passage('"half a quote', "", "0"), Passage("b", "", "1")]


def test_huge_records_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text_records, "_LARGEST", 100)
    (tmp_path / "a.jsonl").write_text('{"query": "a", "pos": ["b"]}\n{"query": "a", "pos": ["' + "b" * 100 + '"]}')
    with pytest.raises(BadRecordError, match=r"record 1 of .*: expected at most 100 bytes in record 1 of .*, got 127"):
        QuerySource(tmp_path / "a.jsonl")[1]


@pytest.mark.parametrize("block", [7, 2**24])
@pytest.mark.parametrize("line", [b"\n", b"\r\n", b" \n", b" \t\n", b" \t   \r\n", b" " * 20 + b"\n"])
def test_blank_lines_are_skipped(tmp_path, monkeypatch, block, line):
    monkeypatch.setattr(text_records, "_BLOCK", block)
    for end in (b"", b"\n", b"\n\t", b"\n" + b" " * 20):
        (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + line * 20 + b"a\n" + line + b" b" + end)
        records = text_records.RecordFile(tmp_path / "a")
        assert [records[i] for i in range(len(records))] == [b"a", b" b"], end


def test_queries_are_cut_with_one_warning(caplog):
    texts = pickle.loads(pickle.dumps(PairTexts(load_tokenizer("bytes", 12), query_length=6)))
    for _ in range(2):
        assert texts.queries(["who wrote faust?"]).shape == (1, 6)
    assert texts.passages([Passage("b", "a")]).tolist() == texts.tokenizer(["a b"]).tolist()
    assert len(caplog.records) == 1
