"""Pictures of the promised size that show what they should."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from infcl_jax.evaluation import plot_curves, plot_retrieval_grid, plots
from infcl_jax.training.metrics import MetricWriter

LEGEND = 40  # pixels above the images of a grid


def pixels(path):
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB")).astype(int)


def green(picture):
    """Number of pixels in the color of the frame (limegreen, 50 205 50)."""
    return int(np.sum(np.abs(picture - [50, 205, 50]).sum(axis=-1) < 20))


@pytest.mark.parametrize(
    ("names", "panels"),
    [
        (("zero_shot/top1", "image_to_text_r5", "accuracy"), 1),
        (("loss", "retrieval/text_to_image_r10"), 2),
    ],
)
def test_curves_have_a_panel_for_each_kind_of_metric(tmp_path, names, panels):
    with MetricWriter(tmp_path) as writer:
        for step in range(5):
            writer.write(step, dict.fromkeys(names, 0.1 * step) | {"logit_scale": 14.3, "loss_weight": 1})
        writer.write(5, {names[0]: math.nan})
    picture = tmp_path / "plots" / "curves.png"
    plot_curves(tmp_path / "metrics.jsonl", picture)
    drawn = pixels(picture)
    assert drawn.shape == (400, 600 * panels, 3)
    for panel in np.split(drawn, panels, axis=1):
        assert len(np.unique(panel.reshape(-1, 3), axis=0)) > 20  # curves, not only a frame


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved meanwhile."""
    saved = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: saved.append(figure))
    return saved


def test_of_many_scores_the_main_ones_are_drawn(tmp_path, figures):
    scores = {f"task{i}/top{k}": 0.5 for i in range(10) for k in (1, 5)}
    with MetricWriter(tmp_path) as writer:
        writer.write(1, scores | {"suite/x/average": 0.5, "task0/mean_per_class_recall": 0.5})
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    (axes,) = figures[0].axes
    names = {text.get_text() for text in axes.get_legend().get_texts()}
    assert names == {f"task{i}/top1" for i in range(10)} | {"suite/x/average"}


def test_curves_show_the_chance_levels_of_their_losses(tmp_path, figures):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"loss": 4.2, "validation/batch_loss": 4.1, "validation/loss": 6.9, "other/loss": 1.0})
    chance = {"loss": math.log(64), "validation/batch_loss": math.log(64), "validation/loss": math.log(1000)}
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", chance=chance)
    (axes,) = figures[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == [
        "loss (64 pairs)",
        "validation/batch_loss (64 pairs)",
        "validation/loss (1000 pairs)",
        "other/loss",
        "chance of 64 pairs: 4.16",
        "chance of 1000 pairs: 6.91",
    ]
    levels = [line.get_ydata()[0] for label, line in lines.items() if label.startswith("chance")]
    assert levels == pytest.approx([math.log(64), math.log(1000)])


def test_curves_need_a_file_with_curves(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl of a run"):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "logit_scale": 3}) + "\n")
    with pytest.raises(ValueError, match="losses or scores"):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")


def grid(path, similarities, **options):
    images = np.full((similarities.shape[1], 8, 8, 3), 128, np.uint8)
    captions = [f"caption {i} costs $\\nothing$" for i in range(len(similarities))]
    plot_retrieval_grid(captions, images, similarities, path, **options)
    return pixels(path)


def test_grid_frames_the_right_image_in_the_column_of_its_rank_with_nan_last(tmp_path):
    similarities = np.array([[9, 5, 4, 3, 2, 1], [9, 8, 7, 3, 2, 1], [np.nan, 2, 3, 4, 5, 6]], np.float32)
    picture = grid(tmp_path / "grid.png", similarities, correct=[0, 2, 0], columns=4)
    assert picture.shape == (LEGEND + 360, 260 + 4 * 120, 3)
    assert green(picture[:LEGEND]) > 30
    cells = picture[LEGEND:, 260:].reshape(3, 120, 4, 120, 3).swapaxes(1, 2)
    framed = [[green(cell) > 100 for cell in row] for row in cells]
    assert framed == [[True, False, False, False], [False, False, True, False], [False] * 4]


def test_grid_takes_image_i_for_caption_i_and_shows_at_most_all_images(tmp_path):
    picture = grid(tmp_path / "grid.png", np.eye(2, 3, dtype=np.float32), columns=7)
    assert picture.shape == (LEGEND + 240, 260 + 3 * 120, 3)
    assert green(picture[LEGEND:, 260:380]) > 200
    assert green(picture[LEGEND:, 380:]) == 0


def test_grid_says_what_the_frame_means(tmp_path, figures):
    images = np.full((2, 8, 8, 3), 128, np.uint8)
    plot_retrieval_grid(["a", "b"], images, np.eye(2, dtype=np.float32), tmp_path / "grid.png")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.texts] == ["correct image"]


@pytest.mark.parametrize(
    ("similarities", "options", "message"),
    [
        (np.zeros((2, 4)), {}, "similarities of shape"),
        (np.zeros((3, 4)), {"correct": [0, 1]}, "integers in correct"),
        (np.zeros((3, 4)), {"correct": [0, 1, 4]}, r"\[0, 4\)"),
        (np.zeros((3, 4)), {"columns": 0}, "columns >= 1"),
    ],
)
def test_grid_names_bad_arguments(tmp_path, similarities, options, message):
    with pytest.raises(ValueError, match=message):
        plot_retrieval_grid(
            ["a", "b", "c"], np.zeros((4, 8, 8, 3), np.uint8), similarities, tmp_path / "g.png", **options
        )
