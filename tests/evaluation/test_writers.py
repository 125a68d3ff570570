"""Results as JSON, CSV, an HTML page, a table and one line."""

import base64
import csv
import dataclasses
import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from infcl_jax.evaluation import append_csv, describe_environment, format_line, format_table, write_json, write_page
from infcl_jax.evaluation.results import Confusion, ExamplePrediction, TaskResult
from infcl_jax.evaluation.writers import write_examples

ENVIRONMENT = {"date": "2026-01-01T00:00:00+00:00", "model": "ViT-B/32, tuned", "weights": 'a "file"'}

HOSTILE = '<script>alert("1")</script> & <img src=x onerror=y> "\''
RESULTS = {
    "validation/loss": 1.23456,
    **{f"retrieval/{way}_r{k}": 0.5 + k / 20 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)},
    "zero_shot/top1": 0.942,
    "zero_shot/top5": 1.0,
}
TABLE = """\
                                 k = 1    k = 5   k = 10
retrieval image to text (R@k)   55.0 %   75.0 %  100.0 %
retrieval text to image (R@k)   55.0 %   75.0 %  100.0 %
zero-shot (top-k accuracy)      94.2 %  100.0 %
validation loss (nats)          1.2346"""
LINE = "  ".join(
    (
        "validation/loss 1.2346",
        "retrieval/image_to_text_r1 55.0 %",
        "retrieval/text_to_image_r1 55.0 %",
        "zero_shot/top1 94.2 %",
    )
)


def result(name="imagenet1k", **metrics):
    metrics = metrics or {"top1": np.float32(0.5), "top5": 0.75}
    return TaskResult(name=name, kind="zero_shot", metrics=metrics, main_metric="top1", images=50_000)


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_environment_names_model_devices_and_versions():
    environment = describe_environment("ViT-B-32", "run")
    assert environment["model"] == "ViT-B-32" and environment["weights"] == "run"
    assert environment["devices"].startswith("8 x ")
    assert environment["date"].endswith("+00:00")
    assert environment["numpy"] == np.__version__


def test_json_holds_results_and_environment(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")
    write_json(path, [result(), result("b", top1=float("nan"))], ENVIRONMENT)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["environment"] == ENVIRONMENT
    assert content["results"][0] == {
        "name": "imagenet1k",
        "kind": "zero_shot",
        "images": 50_000,
        "main_metric": "top1",
        "metrics": {"top1": 0.5, "top5": 0.75},
    }
    assert content["results"][1]["metrics"] == {"top1": None}
    assert list(tmp_path.iterdir()) == [path]


def test_examples_hold_thumbnails_and_confusions(tmp_path):
    image = np.full((500, 250, 3), 200, np.uint8)
    example = ExamplePrediction(image, ("cat",), ("dog", "cat"), (0.5, 0.25), False)
    shown = dataclasses.replace(result(), examples=(example,), confusions=(Confusion("cat", "dog", 3),))
    write_examples(tmp_path / "examples.json", [shown, result("b")])
    content = json.loads((tmp_path / "examples.json").read_text())
    assert content.keys() == {"imagenet1k"}
    assert content["imagenet1k"]["confusions"] == [{"expected": "cat", "predicted": "dog", "images": 3}]
    (written,) = content["imagenet1k"]["examples"]
    kind, picture = written.pop("image").split(",")
    assert Image.open(io.BytesIO(base64.b64decode(picture))).size == (112, 224) and kind == "data:image/jpeg;base64"
    expected = {"expected": ["cat"], "predicted": ["dog", "cat"], "similarity": [0.5, 0.25], "correct": False}
    assert written == expected


def test_csv_has_one_header_and_a_row_per_evaluation(tmp_path):
    path = tmp_path / "results.csv"
    path.touch()
    for model in ("a", "b"):
        assert append_csv(path, [result(), result("x", top1=1 / 3)], ENVIRONMENT | {"model": model}) == path
    header, *values = rows(path)
    assert header == ["date", "model", "weights", "imagenet1k/top1", "imagenet1k/top5", "x/top1"]
    assert [row[1] for row in values] == ["a", "b"]
    assert values[0][2] == 'a "file"' and float(values[0][5]) == 1 / 3


def test_csv_of_other_columns_goes_to_another_file(tmp_path):
    path = tmp_path / "results.csv"
    paths = [append_csv(path, [result(name)], ENVIRONMENT) for name in ("a", "b", "c", "b", "a")]
    assert [path.name for path in paths] == [
        "results.csv",
        "results-2.csv",
        "results-3.csv",
        "results-2.csv",
        "results.csv",
    ]
    assert [len(rows(path)) for path in paths[:3]] == [3, 3, 2]


def test_csv_refuses_two_values_of_one_column(tmp_path):
    append_csv(tmp_path / "results.csv", [result(), result(loss=1.0)], ENVIRONMENT)
    with pytest.raises(ValueError, match="got imagenet1k/top1 twice"):
        append_csv(tmp_path / "results.csv", [result(), result()], ENVIRONMENT)


class Page(HTMLParser):
    """Tags with their attributes, and the texts of a page; checks that tags nest."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open += [tag] if tag not in ("meta", "img") else []

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag, attribute):
        return [attributes.get(attribute) for name, attributes in self.tags if name == tag]


def test_the_page_shows_all_results_escapes_texts_and_loads_nothing(tmp_path):
    image = np.zeros((8, 16, 3), np.uint8)
    examples = tuple(
        ExamplePrediction(image, (text, "two"), (text, "other"), (0.25, -0.125), text == "cat")
        for text in ("cat", HOSTILE, "lone \ud800")
    )
    shown = dataclasses.replace(result(HOSTILE, top1=0.5, mean_per_class_recall=0.25), examples=examples)
    suite = TaskResult(name="suite", kind="average", metrics={"average": 0.1}, main_metric="average", images=38)
    loss = TaskResult(name="run", kind="loss", metrics={"loss": 1.5}, main_metric="loss", images=3)
    write_page(tmp_path / "page.html", [shown, suite, loss], {"model": HOSTILE, "weights": "runs/a"})
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert {f"Evaluation of {HOSTILE}", HOSTILE, f"True: {HOSTILE}; two", f"{HOSTILE} (0.250)", "other (-0.125)"} < (
        texts := set(page.texts)
    )
    assert {"50.00 %", "mean per class recall", "25.00 %", "50,000", "zero-shot", "1.5000 nats", "38 tasks"} < texts
    assert not {"link", "script", "iframe", "base"} & {tag for tag, _ in page.tags}
    assert all(not name.startswith("on") and name != "href" for _, attributes in page.tags for name in attributes)
    assert [source.partition(",")[0] for source in page.all("img", "src")] == ["data:image/jpeg;base64"] * 3
    assert page.all("img", "alt")[1] == f"{HOSTILE}; two"
    assert page.all("figure", "class") == ["correct", "mistake", "mistake"]
    contents = page.all("meta", "content")
    assert any("default-src 'none'" in (content or "") for content in contents)
    assert "width=device-width, initial-scale=1" in contents  # fits a phone
    assert page.all("div", "class").count("scroll") == len(page.all("table", "class")) == 5


@pytest.mark.parametrize(
    ("results", "table", "line"),
    [
        (RESULTS, TABLE, LINE),
        ({"validation/loss": 2.0}, "validation loss (nats)   2.0000", "validation/loss 2.0000"),
        ({}, "", ""),
        (
            {
                "vtab/pets/top1": 0.5,
                "vtab/pets/mean_per_class_recall": 0.25,
                "suite/datacomp38/average_of_1_of_38": 0.25,
            },
            """\
                                       k = 1
vtab pets (top-k accuracy)            50.0 %
vtab pets mean per class recall       25.0 %
suite datacomp38 average of 1 of 38   25.0 %""",
            "vtab/pets/top1 50.0 %  suite/datacomp38/average_of_1_of_38 25.0 %",
        ),
    ],
)
def test_results_are_formatted(results, table, line):
    assert format_table(results) == table
    assert format_line(results) == line
