"""The notebooks run from first to last cell with the results that they describe."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run(name):
    """The text that the cells of a notebook print or show."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": NOTEBOOKS}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quickstart():
    *_, results = shown = run("quickstart.ipynb")
    (losses,) = (text for text in shown if text.startswith("xla"))
    assert len({line.split()[2] for line in losses.splitlines()}) == 1  # every implementation, the same loss
    assert eval(results)["retrieval/image_to_text_r10"] > 0.3
