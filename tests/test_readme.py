"""The examples of the pages, and the links of every page."""

import re
from pathlib import Path

import captioned
import numpy as np
import pytest
import runs

from infcl_jax.evaluation import FeatureRows
from infcl_jax.evaluation.feature_files import write_shard

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def examples(page):
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def test_the_loss_example_runs_and_is_right():
    names = {}
    exec(examples(README)[0], names)
    image, text, loss = (np.asarray(names[name], np.float64) for name in ("image", "text", "loss"))
    logits = 14.3 * image @ text.T
    expected = (np.logaddexp.reduce(logits, 1) + np.logaddexp.reduce(logits, 0)) / 2 - np.diagonal(logits)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-6)
    assert [g.shape for g in names["gradients"]] == [image.shape, text.shape, ()]


def test_the_examples_of_using_a_model_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.save(tmp_path / "runs" / "quickstart", {1: 1.0})
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / f"{name}.jpg").write_bytes(captioned.jpeg(number))
    for name in ("photos", "captions"):
        rows = FeatureRows(np.eye(20, 24, dtype=np.float32), np.arange(20), [f"{i}.jpg" for i in range(20)])
        write_shard(tmp_path / f"{name}.safetensors", rows, {})
    names = {}
    for example in [*examples(README)[1:], *examples((ROOT / "docs" / "using_models.md").read_text())]:
        exec(example, names)
        assert names["probabilities"].sum() == pytest.approx(len(names["probabilities"]))
    assert names["image"].shape == (2, 16) and names["classifier"].shape == (2, 16)
    assert names["nearest"][0] == "0.jpg"


def anchors(page):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if not path.startswith("https://"):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
