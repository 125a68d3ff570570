"""The examples of the pages, and the links of every page."""

import re
from pathlib import Path

import captioned
import numpy as np
import pytest
import runs

import infcl_jax
from infcl_jax.data import FeatureStore
from infcl_jax.inference.feature_files import write_features
from infcl_jax.run import notebook
from infcl_jax.run.callbacks import Callbacks
from infcl_jax.settings import make_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def examples(page):
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


TRAINING, LOSS, *USING = examples(README)
(FRONT_PAGE,) = examples((ROOT / "docs" / "index.md").read_text())


def test_the_examples_of_training_have_right_settings(monkeypatch):
    """`tests/run/test_train.py` trains; this checks names, values and callbacks."""
    trained = []

    def train(settings, workdir, callbacks=()):
        assert make_config(settings) and Callbacks(callbacks)
        trained.append(workdir)

    monkeypatch.setattr(infcl_jax, "train", train, raising=False)
    monkeypatch.setattr(infcl_jax, "load", trained.append, raising=False)
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    names = {"__name__": "__main__"}
    pages = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("get_started", "training")]
    for example in (TRAINING, *(example for page in pages for example in examples(page))):
        exec(example, names)
    assert trained == ["runs/photos", "runs/digits", "runs/digits", "runs/losses"]


@pytest.mark.parametrize("example", [LOSS, FRONT_PAGE], ids=["README", "docs/index"])
def test_the_loss_example_runs_and_is_right(example):
    names = {}
    exec(example, names)
    image, text, loss = (np.asarray(names[name], np.float64) for name in ("image", "text", "loss"))
    logits = 14.3 * image @ text.T
    expected = (np.logaddexp.reduce(logits, 1) + np.logaddexp.reduce(logits, 0)) / 2 - np.diagonal(logits)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-6)
    if example == LOSS:
        assert [g.shape for g in names["gradients"]] == [image.shape, text.shape, ()]


def test_the_examples_of_using_a_model_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.save(tmp_path / "runs" / "quickstart", {1: 1.0})
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / f"{name}.jpg").write_bytes(captioned.jpeg(number))
    for name in ("photos", "captions"):
        store = FeatureStore(tmp_path / "store", "key", 20)
        store.write(0, {"features": np.eye(20, 24, dtype=np.float32), "starts": np.arange(21)})
        write_features(tmp_path / f"{name}.safetensors", store, "{}.jpg".format)
    names = {}
    for example in [*USING, *examples((ROOT / "docs" / "using_models.md").read_text())]:
        exec(example, names)
        assert names["probabilities"].sum() == pytest.approx(len(names["probabilities"]))
    assert names["image"].shape == (2, 16) and names["classifier"].shape == (2, 16)
    assert names["nearest"][0] == "0.jpg"


def anchors(page):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        if not path.startswith("https://"):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
