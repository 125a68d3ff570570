"""The notebooks run from first to last cell outside the checkout, with the results that they describe."""

import re

import nbformat
import notebook_runner
import pytest


@pytest.mark.parametrize("name", notebook_runner.NOTEBOOKS)
def test_stored_notebooks_have_outputs_a_badge_and_an_install_cell(name):
    notebook = nbformat.read(notebook_runner.NOTEBOOKS[name], as_version=4)
    head, install = notebook.cells[0].source, notebook.cells[1].source
    assert f"blob/main/notebooks/{name}.ipynb" in head and '"infcl_jax' in install
    assert len(set(re.findall(r"([\w-]+)/infcl_jax(?:/blob|\")", head + install))) == 1  # one repository
    assert notebook_runner.pictures(notebook)
    assert not any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quickstart():
    shown = notebook_runner.text(notebook_runner.execute("quickstart"))
    results = dict(re.findall(r"^(\w+/\w+_r5) +([\d.]+)%$", shown, re.M))
    assert len(results) == 2 and min(map(float, results.values())) > 30
