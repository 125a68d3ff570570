"""Linear probes and few-shot classification as evaluations, against the functions on the same features."""

import csv
import json
import re

import benchmark_layout as layout
import captioned
import jax
import numpy as np
import oracle
import pytest
import runs

from infcl_jax.data import ByteTokenizer
from infcl_jax.data.decode import decode
from infcl_jax.data.transforms import resize_center_crop
from infcl_jax.evaluation import (
    EvaluationConfig,
    Suite,
    Task,
    few_shot,
    flat_metrics,
    format_line,
    format_table,
    linear_probe,
    suite,
    write_results,
)
from infcl_jax.runtime.mesh import replicate

LABELS = {"train": np.arange(15) % 3, "test": np.arange(11) % 3}
MODEL, MESH = runs.Linear(), oracle.mesh_of(8)
RECALL, FEW = "mean_per_class_recall", {"shots": (1, 4), "repeats": 2, "regularization": 2.0}


@pytest.fixture(scope="module")
def variables():
    return jax.jit(MODEL.init)(jax.random.key(0), runs.batch(1)["image"], runs.batch(1)["text"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same images as a benchmark of clip_benchmark's layout and as tables."""
    data = tmp_path_factory.mktemp("data")
    for split, labels in LABELS.items():
        layout.write_benchmark(data / "wds_mine", layout.classified(labels), split=split, shards=1)
        captioned.write_folder(data / "images", [(f"{i}", {"jpg": captioned.jpeg(i)}) for i in range(len(labels))])
        rows = [(f"../images/{i}.jpg", layout.NAMES[label]) for i, label in enumerate(labels)]
        (data / "tables").mkdir(exist_ok=True)
        captioned.write_csv(data / "tables" / f"{split}.csv", rows, ("path", "label"))
    layout.write_benchmark(data / "wds_alone", layout.classified(LABELS["test"]))
    texts = [{"txt": b"a text", "jpg": captioned.jpeg(i)} for i in range(3)]
    for split in LABELS:
        layout.write_benchmark(data / "wds_texts", texts, kind="retrieval", split=split)
        layout.write_benchmark(data / "wds_one", layout.classified([2] * 5), split=split)
    return data


@pytest.fixture(scope="module")
def samples(variables):
    """Features and labels of the training images, then of the test images."""
    arrays = []
    for labels in LABELS.values():
        pixels = [resize_center_crop(decode(captioned.jpeg(i)), runs.SIDE) for i in range(len(labels))]
        arrays += [np.asarray(MODEL.apply(variables, np.stack(pixels), method="encode_image")), labels]
    return arrays


def make_suite(data, evaluations):
    config = EvaluationConfig(batch_size=8, data_dir=str(data))
    arguments = {"image_size": runs.SIDE, "data_dir": "nowhere", "mesh": MESH, "evaluations": evaluations}
    return Suite(config, MODEL, ByteTokenizer(runs.CONTEXT), **arguments)


def write_task(path, dataset, **fields):
    body = ", ".join(f"{name}={value!r}" for name, value in ({"name": path.stem} | fields).items())
    path.write_text(
        f"from infcl_jax.evaluation import Task\nget_task = lambda: Task(dataset={str(dataset)!r}, {body})\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("dataset", "fields", "probe", "main_metric"),
    [
        ("tables", {"kind": "linear_probe", "regularization": 0.1}, linear_probe, "top1"),
        ("wds_mine", {"kind": "linear_probe", "main_metric": RECALL, "regularization": 0.1}, linear_probe, RECALL),
        ("wds_mine", {"kind": "few_shot"} | FEW, few_shot, "4_shot"),
        ("tables", {"kind": "few_shot", "classifier": "ridge"} | FEW, few_shot, "4_shot"),
    ],
)
def test_numbers_are_those_of_the_functions(data, variables, samples, tmp_path, dataset, fields, probe, main_metric):
    path = write_task(tmp_path / "mine.py", data / dataset, **fields)
    (result,) = make_suite(data, [path]).results(replicate(MESH, variables), examples=True)
    options = {name: value for name, value in fields.items() if name not in ("kind", "main_metric")}
    expected = dict(probe(*samples, **options, metric=fields.get("main_metric", "top1"), mesh=MESH).metrics)
    if dataset == "tables":  # of three classes
        expected.pop("top5", None)
    assert result.metrics == pytest.approx(expected, abs=1e-6)
    assert (result.kind, result.main_metric, result.images) == (fields["kind"], main_metric, len(LABELS["test"]))


def test_splits_are_encoded_once_and_all_results_are_written(data, variables, tmp_path, monkeypatch):
    original, sizes = suite.encode_split, []

    def encode_split(*arguments):
        features = original(*arguments)
        sizes.append(len(features))
        return features

    monkeypatch.setattr(suite, "encode_split", encode_split)
    path = write_task(tmp_path / "few.py", data / "wds_mine", kind="few_shot", classifier="ridge", shots=(2,))
    results = make_suite(data, ["mine", "mine:linear_probe", path]).results(replicate(MESH, variables))
    assert sizes == [len(LABELS["test"]), len(LABELS["train"])]
    write_results(tmp_path, results, "tiny", "random")
    written = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(row["name"], row["kind"]) for row in written] == [
        ("mine", "zero_shot"),
        ("mine:linear_probe", "linear_probe"),
        ("few", "few_shot"),
    ]
    with open(tmp_path / "results.csv") as file:
        (row,) = csv.DictReader(file)
    flat = flat_metrics(results)
    assert {name: float(row[name]) for name in flat} == flat
    assert "mine:linear_probe" in (page := (tmp_path / "results.html").read_text()) and "few-shot" in page
    assert f"few/2_shot {100 * flat['few/2_shot']:.1f} %" in (line := format_line(flat)) and "2_shot_std" not in line
    assert f"few 2 shot   {100 * flat['few/2_shot']:.1f} %" in re.sub(" {3,}", "   ", format_table(flat))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("alone:linear_probe", FileNotFoundError, "wds_alone has no split 'train': expected train/nshards.txt"),
        ("texts:few_shot", ValueError, "expected one label per image for texts:few_shot, got a dataset of type retrie"),
        ("one:linear_probe", ValueError, "one:linear_probe: expected .* two or more classes, got 1 class"),
        ("one:few_shot", ValueError, "one:few_shot: expected .* two or more classes, got 1 class"),
        ("mine:few_shot", ValueError, "mine:few_shot: expected 16 training samples of every class, got 5 of class 0"),
        ("nothing:few_shot", FileNotFoundError, "no evaluation nothing:few_shot: .* the folder wds_nothing with"),
        ("retrieval:few_shot", ValueError, "expected a benchmark with few_shot, got retrieval:few_shot"),
        ("a.py:linear_probe", ValueError, "expected a benchmark with linear_probe, got a.py:linear_probe"),
    ],
)
def test_datasets_that_do_not_fit_are_refused(data, variables, name, error, message):
    with pytest.raises(error, match=f"^[^\\n]*{message}[^\\n]*$"):
        make_suite(data, [name])(replicate(MESH, variables))


@pytest.mark.parametrize(
    ("column", "message"),
    [("label", "expected the same classes in the splits train and test of .* 2 and 1"), ("caption", "has no label")],
)
def test_labels_of_both_splits_must_fit(data, tmp_path, column, message):
    for split, classes in (("train", ("cat", "dog")), ("test", ("dog", "dog"))):
        rows = [(f"{data}/images/{i}.jpg", name) for i, name in enumerate(classes)]
        captioned.write_csv(tmp_path / f"{split}.csv", rows, ("path", column))
    with pytest.raises(ValueError, match=message):
        make_suite(data, [write_task(tmp_path / "a.py", tmp_path, kind="linear_probe")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "linear_probe", "shots": (1,)}, "expected shots of task a only with the kind few_shot, got linear"),
        ({"regularization": 1.0}, "regularization of task a only with the kind linear_probe or few_shot, got None"),
        ({"kind": "few_shot", "templates": "cars"}, "templates of task a only with the kind zero_shot, got few_shot"),
        ({"kind": "few_shot", "shots": (0,)}, "shots >= 1"),
        ({"kind": "few_shot", "classifier": "svm"}, "got 'svm'"),
        ({"kind": "linear_probe", "regularization": -1.0}, "expected a finite regularization of task a >= 0, got -1"),
        ({"kind": "linear_probe", "train_split": "test"}, "expected train_split of task a to differ from split"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Task(name="a", dataset="x", **fields)
