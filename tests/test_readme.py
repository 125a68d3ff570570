"""The example in the README, and the links of every page."""

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_the_example_runs_and_is_right():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {}
    exec(example, names)
    image, text, loss = (np.asarray(names[name], np.float64) for name in ("image", "text", "loss"))
    logits = 14.3 * image @ text.T
    expected = (np.logaddexp.reduce(logits, 1) + np.logaddexp.reduce(logits, 0)) / 2 - np.diagonal(logits)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-6)
    assert [g.shape for g in names["gradients"]] == [image.shape, text.shape, ()]


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
