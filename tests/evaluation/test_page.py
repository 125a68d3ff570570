"""HTML page of results, parsed."""

import base64
import io
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from infcl_jax.evaluation import write_page
from infcl_jax.evaluation.results import ExamplePrediction, TaskResult

HOSTILE = '<script>alert("1")</script> & <img src=x onerror=y> "\''
_VOID = {"meta", "img"}


class Page(HTMLParser):
    """Elements, attributes and texts of a page; checks that tags nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style" and data.strip():
            self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def example(correct, size=8, text=HOSTILE):
    rows, columns = np.mgrid[:size, : 2 * size]
    image = np.stack([0 * rows + 250, 20 * correct + 0 * rows, 0 * columns], axis=-1).astype(np.uint8)
    return ExamplePrediction(image, (text, "two"), (text, "other"), (0.25, -0.125), correct)


@pytest.fixture
def page(tmp_path):
    results = [
        TaskResult(
            name=f"task {HOSTILE}",
            kind="zero_shot",
            metrics={"top1": 0.5, "mean_per_class_recall": 0.25},
            main_metric="top1",
            images=50_000,
            examples=(example(True), example(False, size=500), example(False, text="lone \ud800")),
        ),
        TaskResult(name="suite", kind="average", metrics={"average": 0.125}, main_metric="average", images=38),
        TaskResult(name="run", kind="loss", metrics={"loss": 1.5}, main_metric="loss", images=3),
    ]
    write_page(tmp_path / "page.html", results, {"model": HOSTILE, "weights": "runs/a"})
    return Page((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_texts_are_escaped(page):
    assert page.all("script") == []
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert f"Evaluation of {HOSTILE}" in page.texts
    assert f"task {HOSTILE}" in page.texts
    assert f"True: {HOSTILE}; two" in page.texts
    assert [attributes["alt"] for attributes in page.all("img")][:2] == [f"{HOSTILE}; two"] * 2


def test_page_loads_nothing(page):
    assert not {"link", "script", "iframe", "base"} & {tag for tag, _ in page.elements}
    sources = [attributes[name] for _, attributes in page.elements for name in ("src", "href") if name in attributes]
    assert len(sources) == 3 and all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert any("default-src 'none'" in attributes.get("content", "") for attributes in page.all("meta"))


def test_images_are_thumbnails(page):
    pictures = [
        Image.open(io.BytesIO(base64.b64decode(attributes["src"].partition(",")[2]))) for attributes in page.all("img")
    ]
    assert [picture.size for picture in pictures] == [(16, 8), (224, 112), (16, 8)]
    red, green, blue = pictures[0].getpixel((3, 3))
    assert red > 240 and green < 40 and blue < 20


def test_tables_hold_all_metrics(page):
    for text in (
        "top1",
        "50.00 %",
        "mean per class recall",
        "25.00 %",
        "50,000",
        "zero-shot",
        "1.5000 nats",
        "runs/a",
        "38 tasks",
    ):
        assert text in page.texts
    assert len(page.all("table")) == 5


def test_examples_show_mistakes_and_similarities(page):
    assert [attributes["class"] for attributes in page.all("figure")] == ["correct", "mistake", "mistake"]
    assert f"{HOSTILE} (0.250)" in page.texts and "other (-0.125)" in page.texts
    assert page.texts.count("Mistake") == 2


def test_page_fits_a_phone(page):
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert [attributes.get("class") for attributes in page.all("div")].count("scroll") == len(page.all("table"))
