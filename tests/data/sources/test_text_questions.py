"""Queries and relevance judgments of text retrieval in every layout."""

from pathlib import Path

import pytest

from infcl_jax.data.sources.text_questions import Question, read_judgments, read_questions

MARCO = [("[citation needed] what is", "7", ()), ("[PDF]", "8", ()), ("[1]", "9", ())]
GOLDEN = Path(__file__).parents[2] / "golden" / "retrieval"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('who\t[\'a\', "b\'s"]\n"""who"""\t"[""d\'A""]"\r\n', [("who", "", ("a", "b's")), ('"who"', "", ("d'A",))]),
        ("question\tanswers\nwho\t['a', 1912]", [("who", "", ("a", "1912"))]),
        ("who\t'[a]'\n", [("'[a]'", "who", ())]),
        ('7\twho\n\n8\t"who" is\n', [("who", "7", ()), ('"who" is', "8", ())]),
        ("qid\tquery\r\n7\twho\r\n", [("who", "7", ())]),
        ("\ufeff7\twho\n", [("who", "7", ())]),
        ('{"query": "who", "_id": 7}\n', [("who", "7", ())]),
        ('{"question": "who", "qid": "7"}\n', [("who", "7", ())]),
        ('{"text": "who", "id": 7.0}\n', [("who", "7", ())]),
        ('\ufeff[{"query": "who", "query_id": 7}]', [("who", "7", ())]),
        ('{"_id": null, "id": "7", "question": null, "query": "who"}', [("who", "7", ())]),
        ('{"query": "who", "answers": "Paris"}', [("who", "", ("Paris",))]),
        ('{"query": "who", "answer": ["a", 1912]}', [("who", "", ("a", "1912"))]),
        ('{"query": "who", "answers": null}', [("who", "", ())]),
        ('{"query": "who", "answers": ""}', [("who", "", ())]),
        ('{"query": "who", "answers": ["", " ", "a"]}', [("who", "", ("a",))]),
        ('{"query": "who", "answers": "[\'Paris\', \'Rome\']"}', [("who", "", ("Paris", "Rome"))]),
        ('{"query": "who", "answers": "[\'Paris\' \'Rome\']"}', [("who", "", ("Paris", "Rome"))]),
        ('{"query": "who", "answers": "[PDF]"}', [("who", "", ("[PDF]",))]),
        ("7\t[citation needed] what is\n8\t[PDF]\n9\t[1]\n5\t['a']", [*MARCO, ("['a']", "5", ())]),
        ("qid\tquery\n7\t[citation needed] what is\n8\t[PDF]\n9\t[1]", MARCO),
        ("query_id\tquery_text\n7\twho", [("who", "7", ())]),
        ("who\t['', 'b']\nwhy\t['']", [("who", "", ("b",)), ("why", "", ())]),
        ("why\t['']\nwho\t[]", [("why", "", ()), ("who", "", ())]),
        ("title\ttopic_id\nwho\t7", [("who", "7", ())]),
        ("Query\tQuery ID\n'who'\t7", [("'who'", "7", ())]),
        ("id\tquestion\tanswers\n7\twho\t['a']\n8\twhy\tb", [("who", "7", ("a",)), ("why", "8", ("b",))]),
        ("answers\tquestion\n['a', 1]\twho", [("who", "", ("a", "1"))]),
        ("7\twho\n  \t  \n8\twhy", [("who", "7", ()), ("why", "8", ())]),
    ],
)
def test_layouts_of_questions(tmp_path, text, expected):
    (tmp_path / "q").write_bytes(text.encode())
    assert read_questions(tmp_path / "q") == [Question(*fields) for fields in expected]


@pytest.mark.parametrize(
    ("name", "line", "match"),
    [
        ("a.jsonl", b'{"query": "a", "answers": 3}', "expected a list in answers, got a number"),
        ("a.jsonl", b'{"query": "a", "answers": {"text": ["b"]}}', "expected a list in answers, got an object"),
        ("a.jsonl", b'{"query": "a", "answers": ["b", null]}', "expected a text in answers, got null"),
        ("a.jsonl", b'{"query": null, "answers": ["b"]}', "null in query"),
        ("a.jsonl", b'{"query": ["a"]}', "expected a text in query, got a list"),
        ("a.jsonl", b'{"answers": ["a"]}', "expected one of the fields"),
        ("a.jsonl", b'{"query": ' + b"[" * 100_000, "got one that is nested too deeply"),
        ("qa.csv", b"a\t[" + b"(" * 300 + b"]", "expected a list of answers as in line 1"),
        ("qa.csv", b"a\t[b]", "expected a list of answers as in line 1"),
        ("qa.csv", b"a\t['\0']", "expected a list of answers"),
        ("qa.csv", b"a\tb", r"expected a list of answers as in line 1, got 'b'"),
        ("a.csv", b"a\xff\tb", "codec"),
        ("a.csv", b"a\tb\tc", "expected 2 columns, got 3"),
        ("a.csv", b"a\t", "a blank one"),
    ],
)
def test_damaged_questions_are_named(tmp_path, name, line, match):
    first = {"a.jsonl": b'{"query": "a"}', "a.csv": b"1\ta", "qa.csv": b"a\t['b']"}[name]
    (tmp_path / name).write_bytes(first + b"\n\n" + line)
    with pytest.raises(ValueError, match=rf"^line 3 of .*{name}: .*({match})"):
        read_questions(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "7 0 3 1\n7\t0\t4\t0\n7 0 5 2\n",
        "7 Q0 3 1.0\n\n7 Q0 4 -1\n7 Q0 5 0.5\n\n",
        "qid\titer\tdocid\trel\r\n7\t0\t3\t1\r\n7\t0\t5\t1",
        "query-id\tcorpus-id\tscore\n7\t3\t1\n7\t4\t0\n7\t5\t1\n",
        "7\t3\t1\n7\t5\t1.0\n7\t4\t0.0\n",
        "7 3\n7 5\n",
        "query_id corpus_id\n7 3\n7 5\n",
        "Query ID\tDoc ID\tRelevance\n7\t3\t1\n7\t5\t1\n",
        "Query ID\tDoc ID\n7\t3\n7\t5\n",
        "#qid\tdocid\trel\n7\t3\t1\n7\t5\t1\n",
        "corpus-id\tquery-id\tscore\n3\t7\t1\n5\t7\t1\n",
        "score docno qid\n1 3 7\n1 5 7\n0 6 7\n",
        "a b grading\n7 3 1\n7 5 1\n",
        "passage_id\tquery_id\n3\t7\n5\t7\n",
        "\ufeff7 0 3 1\n7 0 5 1\n8 0 3 0\n",
    ],
)
def test_layouts_of_judgments(tmp_path, text):
    (tmp_path / "qrels").write_bytes(text.encode())
    assert read_judgments(tmp_path / "qrels") == {"7": {"3", "5"}}


@pytest.mark.parametrize(
    "line",
    [b"7 0 3", b"7 0 3 yes", b"7 0 \xff 1", b"7 0 3 " + b"1" * 5000, b"7 0 3 nan", b"7 0 3 1 x", b"7", b"qid 0 3 r"],
)
@pytest.mark.parametrize("first", [b"7 0 3 1\n", b"qid iter docid rel\n"])
def test_damaged_judgments_are_named(tmp_path, first, line):
    (tmp_path / "qrels").write_bytes(first + b"\n" + line)
    with pytest.raises(ValueError, match=r"^expected 4 columns, .* in line 3 of .*qrels, got "):
        read_judgments(tmp_path / "qrels")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a b c d e", "expected two to four columns, .* in line 1 of .*qrels, got 5"),
        ("q1,d1,1", r"in line 1 of .*qrels, got 1 column\(s\), separated by commas; separate them by tabs"),
        ("7 0 3 nan\n", "in line 1 of .*qrels, got the relevance nan"),
        ("score query-id part\n1 7 3", "in line 1 of .*qrels, got the names .*; name the columns query-id, corpus-id"),
        ("7 0 3 0\n", "expected relevant passages in .*qrels, got none"),
        ("", "expected relevant passages in .*qrels, got none"),
    ],
)
def test_other_judgments_are_refused(tmp_path, text, match):
    (tmp_path / "qrels").write_text(text)
    with pytest.raises(ValueError, match=match):
        read_judgments(tmp_path / "qrels")


def test_files_of_beir():
    questions = read_questions(GOLDEN / "beir_queries.jsonl")
    assert questions[0] == Question("what is word0?", "q0") and len(questions) == 4
    assert read_judgments(GOLDEN / "beir_qrels.tsv") == {"q0": {"d0", "d2"}, "q1": {"d1", "d3"}, "q2": {"gone"}}
