"""Live curves: a picture below the cell, updated in place, with all the curves of the run."""

import json
import math

import IPython
import pytest

from infcl_jax.evaluation.plots import draw_curves
from infcl_jax.run import notebook
from infcl_jax.settings import default_config


@pytest.fixture
def shown(monkeypatch):
    """Pictures in a notebook: [(kind, PNG), ...]; and the lines of each."""
    pictures, drawn = [], []

    class Handle:
        def update(self, picture):
            pictures.append(("update", picture.data))

    def display(picture, display_id):
        pictures.append(("display", picture.data))
        return Handle()

    def draw(lines, chance):
        drawn.append(lines)
        return draw_curves(lines, chance)

    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(notebook, "draw_curves", draw)
    return pictures, drawn


def test_one_picture_is_updated_in_place(shown, tmp_path):
    pictures, drawn = shown
    curves = notebook.LiveCurves(seconds=0.0)
    curves.on_start(default_config(), tmp_path, 0)
    assert pictures == []
    for step in (1, 2):
        curves._next = 0.0  # drawing takes longer than these steps
        curves.on_step(step, {"loss": 4.0 - step, "logit_scale": 14.0})
    curves.on_step(3, {"loss": 0.5})  # too soon
    assert len(pictures) == 2
    curves.on_evaluation(3, {"zero_shot/top1": 0.5})
    curves.on_end(3, {})
    assert [kind for kind, _ in pictures] == ["display", "update", "update", "update"]
    assert all(data.startswith(b"\x89PNG") for _, data in pictures)
    losses = [{"step": step, "loss": loss} for step, loss in ((1, 3.0), (2, 2.0), (3, 0.5))]
    assert drawn[-1] == [*losses, {"step": 3, "zero_shot/top1": 0.5}]


def test_both_losses_have_the_same_batch_and_a_chance_line(shown, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(notebook, "draw_curves", lambda *arguments: figures.append(draw_curves(*arguments)))
    curves = notebook.LiveCurves()
    curves.on_chance({name: math.log(64) for name in ("loss", "validation/batch_loss")} | {"zero_shot/top1": 0.1})
    curves.on_start(default_config(), tmp_path, 0)
    curves.on_step(1, {"loss": 3.0})
    curves.on_evaluation(1, {"validation/batch_loss": 2.0, "validation/loss": 4.0, "zero_shot/top1": 0.5})
    labels = [[line.get_label() for line in axes.lines] for axes in figures[-1].axes]
    assert labels[0] == ["loss (64 pairs)", "validation/batch_loss (64 pairs)", "chance of 64 pairs: 4.16"]
    assert labels[1] == ["zero_shot/top1", "chance of 10 classes: 10.0 %"]


def test_a_resumed_run_shows_its_earlier_steps(shown, tmp_path):
    lines = [{"step": step, "time": 0.0, "loss": 1.0} for step in range(1, 5001)]
    evaluation = {"step": 5000, "time": 0.0, "retrieval/r1": 0.5}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, evaluation]))
    curves = notebook.LiveCurves()
    curves.on_start(default_config(), tmp_path, 5000)
    (drawn,) = shown[1]
    assert drawn[-2:] == [lines[-1], evaluation]  # thinned out, but never without the latest step
    assert len(drawn) == 1001 and drawn[0]["step"] <= 5


def test_elsewhere_they_are_refused():
    with pytest.raises(ValueError, match=r"^expected LiveCurves in a Jupyter or Colab notebook, [^\n]* leave it out"):
        notebook.LiveCurves()
