"""The notebooks run from first to last cell outside the checkout, with the results that they describe."""

import re

import nbformat
import notebook_runner
import pytest


@pytest.mark.parametrize("name", notebook_runner.NOTEBOOKS)
def test_stored_notebooks_have_outputs_and_an_install_cell(name):
    notebook = nbformat.read(notebook_runner.NOTEBOOKS[name], as_version=4)
    assert '"infcl_jax' in notebook.cells[1].source
    assert notebook_runner.pictures(notebook)
    assert not any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.mark.parametrize("name", notebook_runner.NOTEBOOKS)
def test_links_of_notebooks_lead_to_files(name):
    path = notebook_runner.NOTEBOOKS[name]
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("https:")]
    assert [link for link in links if not (path.parent / link).exists()] == []


def executes(test):
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore::DeprecationWarning")(test))


def outputs(name, steps=None):
    """The text that a notebook shows, without warnings."""
    shown = notebook_runner.text(notebook_runner.execute(name, steps=steps))
    assert "UserWarning" not in shown
    return shown


@executes
def test_quickstart():
    shown = outputs("quickstart", steps=150)
    results = dict(re.findall(r"^(\w+/\w+_r5) +([\d.]+)%$", shown, re.M))
    assert len(results) == 2 and min(map(float, results.values())) > 20


@executes
def test_your_own_images():
    shown = outputs("your_own_images")
    bytes_tokens, trained_tokens = map(int, re.findall(r"(?<!rows of) (\d+) tokens for ", shown))
    assert trained_tokens < bytes_tokens / 2
    own, mean = map(float, re.search(r"own picture ([\d.]+), to all (-?[\d.]+)$", shown, re.M).groups())
    assert own > 0.7 > 0.3 > mean
    accuracy = [float(percent) for percent in re.findall(r" ([\d.]+)% of 120 pictures$", shown, re.M)]
    assert len(accuracy) == 3 and accuracy[-1] == max(accuracy) > 60


@executes
def test_your_own_training_loop():
    shown = outputs("your_own_training_loop")
    differences = re.findall(r"^largest difference of the losses.*: ([\d.e-]+)$", shown, re.M)
    assert len(differences) == 2 and max(map(float, differences)) < 1e-4
    verdicts = re.findall(r"^(right|wrong)(?:: (\w+)$|: loss and gradients agree)", shown, re.M)
    causes = [cause for verdict, cause in verdicts if verdict == "wrong"]
    assert len(verdicts) == 6 and causes == ["missing_axis_name", "psum_too_many", "no_gradient"]
    assert shown.count("expected floating parameters") == 2 and shown.count("expected axis_name") == 2
    right, wrong = (float(percent) for percent in re.findall(r" R@1 ([\d.]+)%$", shown, re.M))
    assert right > wrong > 10


@executes
def test_openclip_weights():
    shown = outputs("openclip_weights")
    features = [float(difference) for difference in re.findall(r"differ by at most ([\d.e-]+)$", shown, re.M)]
    assert len(features) == 2 and max(features) < 1e-5
    before, after = (int(percent) for percent in re.findall(r"^(\d+)% of 100 pictures are right$", shown, re.M))
    assert before < 40 and after > 70
    assert shown.count("62 tensors match 62 parameters; converted back they are equal") == 2
    exported = [float(difference) for difference in re.findall(r"^largest difference of .*: ([\d.e-]+)$", shown, re.M)]
    assert len(exported) == 2 and max(exported) < 1e-6
