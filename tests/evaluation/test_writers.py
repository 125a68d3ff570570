"""JSON and CSV files of results."""

import base64
import csv
import dataclasses
import io
import json

import numpy as np
import pytest
from PIL import Image

from infcl_jax.evaluation import append_csv, describe_environment, write_json
from infcl_jax.evaluation.results import Confusion, ExamplePrediction, TaskResult
from infcl_jax.evaluation.writers import write_examples

ENVIRONMENT = {"date": "2026-01-01T00:00:00+00:00", "model": "ViT-B/32, tuned", "weights": 'a "file"'}


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
