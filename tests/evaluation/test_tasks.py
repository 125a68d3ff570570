"""Evaluations by name: suites, benchmarks and Python files."""

import json
import logging
import re

import benchmark_layout as layout
import captioned
import pytest

from infcl_jax.data import BadRecordError, Classes, load_source
from infcl_jax.evaluation import Task, class_data, load_benchmark
from infcl_jax.evaluation.scoring import check_labels, check_records, open_task
from infcl_jax.evaluation.suites import DATACOMP38, MAIN_METRICS, SUITES
from infcl_jax.evaluation.tasks import load_tasks, task_classes

LABELS = (0, 1, 2)


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    for name in ("wds_imagenetv2", "wds_vtab-pets_test", "wds_geode_test", "wds_wilds-fmow", "wds_mine"):
        layout.write_benchmark(folder / name, layout.classified(LABELS))
    layout.write_karpathy(folder / "coco", [("test", "val2014", ("a",))])
    return folder


def test_suites_are_those_of_the_papers():
    assert len(set(DATACOMP38)) == len(DATACOMP38) == 38
    assert MAIN_METRICS.keys() < set(DATACOMP38)
    assert all(set(names) <= set(DATACOMP38) for names in SUITES.values())


@pytest.mark.parametrize(
    ("name", "folder", "metric"),
    [
        ("imagenetv2", "wds_imagenetv2", None),
        ("vtab/pets", "wds_vtab-pets_test", "mean_per_class_recall"),
        ("fairness/geode", "wds_geode_test", "worst_group_top1"),
        ("mine", "wds_mine", None),
        ("mscoco_captions", "coco/dataset_coco.json", None),
        ("vtab/pets:linear_probe", "wds_vtab-pets_test", "mean_per_class_recall"),
        ("wilds/fmow:few_shot", "wds_wilds-fmow", None),
    ],
)
def test_a_name_is_that_of_a_folder(benchmarks, name, folder, metric):
    (task,), averages = load_tasks([name, name], benchmarks)
    assert (task.name, task.dataset, task.main_metric, averages) == (name, f"{benchmarks}/{folder}", metric, [])
    assert task.kind == ("retrieval" if folder.endswith(".json") else name.partition(":")[2] or None)


def test_the_tasks_of_a_suite_without_data_are_named_once(benchmarks, caplog):
    with caplog.at_level(logging.WARNING):
        tasks, averages = load_tasks(["imagenet_variants", "imagenetv2", "retrieval"], benchmarks)
    assert [task.name for task in tasks] == ["imagenetv2", "mscoco_captions"]
    assert [(average.name, len(average.tasks)) for average in averages] == [("imagenet_variants", 6), ("retrieval", 2)]
    missing = "imagenet_sketch, imagenet-a, imagenet-o, imagenet-r, objectnet"
    expected = [f"imagenet_variants: 5 of 6 without data: {missing}", "retrieval: 1 of 2 without data: flickr30k"]
    assert caplog.messages == expected


def write_task(path, body):
    path.write_text(f"from infcl_jax.evaluation import Task\n\n\ndef get_task():\n    return {body}\n")
    return str(path)


def test_a_file_describes_a_task(benchmarks, tmp_path):
    names, templates = tmp_path / "names.txt", tmp_path / "templates.txt"
    names.write_text("tabby\npoodle\nwalrus\n")
    templates.write_text("one {c}\n{} here\n")
    fields = f"name='pets', dataset='{benchmarks}/wds_mine', class_names='{names}', templates='{templates}'"
    (task,), _ = load_tasks([write_task(tmp_path / "pets.py", f"Task({fields})")], "nowhere")
    source = load_benchmark(task.dataset, task.split, "nowhere")
    assert task_classes(task, source) == Classes(("tabby", "poodle", "walrus"), ("one {}", "{} here"))


def test_class_names_and_templates_can_be_built_in(benchmarks):
    task = Task(name="x", dataset=f"{benchmarks}/wds_mine", class_names=("a", "b"), templates="imagenet1k")
    source = load_benchmark(task.dataset, task.split, "nowhere")
    assert task_classes(task, source) == Classes(("a", "b"), class_data("imagenet1k").templates)
    named = Task(name="x", dataset="digits", class_names="cifar10")
    assert task_classes(named, load_source("digits", "zero_shot")).names == class_data("cifar10").classes


CUPL = {"tabby": ["a striped cat", "a cat"], "poodle": "a curly dog", "walrus": ["tusks"]}
BY_CLASS = (("a striped cat", "a cat"), ("a curly dog",), ("tusks",))


def test_prompts_of_each_class(benchmarks, tmp_path):
    (tmp_path / "cupl.json").write_text(json.dumps(CUPL), encoding="utf-8-sig")
    source = load_benchmark(f"{benchmarks}/wds_mine", "test", "nowhere")
    for templates in (CUPL, str(tmp_path / "cupl.json")):
        task = Task(name="x", dataset="y", class_names=("tabby", "poodle", "walrus"), templates=templates)
        assert task_classes(task, source) == Classes(("tabby", "poodle", "walrus"), BY_CLASS)
        assert hash(task)
    one = Task(name="x", dataset="y", class_names=("tabby",), templates="a photo of a {}")
    assert task_classes(one, source).templates == ("a photo of a {}",)
    with pytest.raises(
        ValueError, match=r"templates of x: expected prompts of all 6 classes, got none of 'cat', .* 3 more"
    ):
        task_classes(Task(name="x", dataset="y", templates=CUPL), source)


def test_prompts_of_each_class_in_a_benchmark(tmp_path):
    layout.write_benchmark(tmp_path / "wds_x", layout.classified(LABELS))
    names = load_benchmark(f"{tmp_path}/wds_x", "test", "").classes().names
    prompts = {name: [name, f"the {name}"] for name in names}
    (tmp_path / "wds_x" / "zeroshot_classification_templates.json").write_text(json.dumps(prompts))
    source = load_benchmark(f"{tmp_path}/wds_x", "test", "")
    assert task_classes(Task(name="x", dataset="y"), source).templates == tuple(map(tuple, prompts.values()))
    with pytest.raises(ValueError, match="templates of x: expected prompts of all 1 classes, got 6"):
        task_classes(Task(name="x", dataset="y", class_names=("a",)), source)


def class_folder(folder, *splits):
    for name in splits:
        for index, kind in enumerate(("owl", "emu")):
            (folder / name / kind).mkdir(parents=True)
            (folder / name / kind / f"{index}.jpg").write_bytes(captioned.jpeg(index))
    return folder


@pytest.mark.parametrize(
    ("splits", "split", "train"),
    [
        (("train", "test"), "test", True),
        (("train", "val", "test"), "test", True),
        (("train", "val"), "validation", True),
        (("train",), "train", False),
        (("",), "train", False),
    ],
)
def test_a_path_is_an_evaluation(tmp_path, splits, split, train):
    folder = class_folder(tmp_path / "birds", *splits)
    (task,), _ = load_tasks([f"{folder}/"], "nowhere")
    assert (task.name, task.split, task.kind) == ("birds", split, None)
    assert len(load_benchmark(task.dataset, task.split, "nowhere")) == 2
    for kind in ("linear_probe", "few_shot"):
        if train:
            (task,), _ = load_tasks([f"{folder}:{kind}"], "nowhere")
            assert (task.name, task.kind, task.splits) == (f"birds:{kind}", kind, (split, "train"))
        else:
            with pytest.raises(ValueError, match=f"expected the splits train and test in {folder} for {kind}, got one"):
                load_tasks([f"{folder}:{kind}"], "nowhere")


def test_paths_of_files_benchmarks_and_splits(benchmarks, tmp_path):
    folder = class_folder(tmp_path / "birds", "train", "test")
    (folder / "labels.csv").write_text("path,label\ntest/owl/0.jpg,owl\n")
    names = [f"{folder}/test", f"{folder}/labels.csv", f"{benchmarks}/wds_mine", f"{benchmarks}/coco/dataset_coco.json"]
    tasks, _ = load_tasks(names, "nowhere")
    assert [task.name for task in tasks] == ["birds/test", "labels.csv", "wds_mine", "dataset_coco.json"]
    assert [task.split for task in tasks] == ["test", "train", "test", "test"]
    assert [len(load_benchmark(task.dataset, task.split, "nowhere")) for task in tasks] == [2, 1, 3, 1]
    with pytest.raises(ValueError, match="expected the splits train and test"):
        load_tasks([f"{folder}/test:linear_probe"], "nowhere")


@pytest.mark.parametrize(("count", "expected"), [(5, False), (6, True)])
def test_top5_needs_six_classes(tmp_path, count, expected):
    layout.write_benchmark(tmp_path / "wds_x", layout.classified(LABELS))
    (tmp_path / "wds_x" / "classnames.txt").write_text("\n".join("abcdef"[:count]))
    source = load_benchmark(f"{tmp_path}/wds_x", "test", "")
    for kind, train in ((None, None), ("linear_probe", source)):
        opened = open_task(Task(name="x", dataset="y", kind=kind), source, train)
        assert ("top5" in opened.metrics) == opened.has_top5 == expected
    if not expected:
        with pytest.raises(
            ValueError, match=r"expected main_metric of x to be one of \('top1', 'mean_per_class_recall',"
        ):
            open_task(Task(name="x", dataset="y", main_metric="top5"), source)


def test_equal_class_names_are_named_when_the_task_is_opened(tmp_path, caplog):
    layout.write_benchmark(tmp_path / "wds_x", layout.classified(LABELS))
    (tmp_path / "wds_x" / "classnames.txt").write_text("heron\negret\nheron")
    open_task(Task(name="x", dataset="y"), load_benchmark(f"{tmp_path}/wds_x", "test", ""))
    assert "equal names of 2 of 3 classes: 'heron' (2)" in caplog.text


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["cifar11"], FileNotFoundError, "no evaluation cifar11: expected one of imagenet_variants, .*wds_cifar11"),
        (["datacomp38"], FileNotFoundError, "no benchmark of the suite datacomp38 in .*wds_imagenet1k"),
        (["nothing.py"], FileNotFoundError, "nothing.py does not exist"),
        (["bad.py"], ValueError, "cannot load .*bad.py: .*get_task"),
        (["type.py"], ValueError, r"expected get_task\(\) of .*type.py to return an .*Task, got 3"),
        (["raises.py"], ValueError, "cannot load .*raises.py: ZeroDivisionError: .*; expected a function get_task"),
        (["kind.py"], ValueError, "expected the kind of task a to be one of .*, got 'detection'"),
        (["one.py", "two.py"], ValueError, "expected evaluations of different names, got 2 of the name a"),
    ],
)
def test_mistakes_are_named(tmp_path, names, error, message):
    (tmp_path / "bad.py").write_text("x = 1\n")
    write_task(tmp_path / "type.py", "3")
    write_task(tmp_path / "raises.py", "1 / 0")
    write_task(tmp_path / "kind.py", "Task(name='a', dataset='x', kind='detection')")
    write_task(tmp_path / "one.py", "Task(name='a', dataset='x')")
    write_task(tmp_path / "two.py", "Task(name='a', dataset='y')")
    paths = [str(tmp_path / name) if name.endswith(".py") else name for name in names]
    with pytest.raises(error, match=f"^[^\\n]*{message}[^\\n]*$"):
        load_tasks(paths, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[
            ({"templates": [template]}, 'templates of task a: expected "{c}" or "{}" for the class name and no other')
            for template in ("a photo", "a {0}", "{name}", "{} {", "} {}", "{{}}", "{} {x}", "")
        ],
        *[({name: value}, f"expected {name} of task a") for name in ("templates", "class_names") for value in ((), "")],
        ({"class_names": (1, 2)}, "expected class_names of task a to be texts"),
        ({"templates": ("{}", 3)}, "expected templates of task a to be texts"),
        ({"templates": {"a": 3}}, "templates of task a, class 'a': expected texts"),
        ({"name": ""}, "expected a text as name of task '', got ''"),
        ({"dataset": None}, "expected a text as dataset of task 'a', got None"),
        ({"gallery": 1.5}, "expected an integer gallery >= 1 in task a, got 1.5"),
    ],
)
def test_wrong_fields_are_named_before_the_data_is_opened(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Task(**{"name": "a", "dataset": "digits"} | fields)


class Digits:
    """Source with classes whose template has another place."""

    name, split, captioned = "digits", "test", False

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {}

    def classes(self):
        return Classes(("a",), ("{} {0}",))


def test_templates_of_the_dataset_are_checked():
    with pytest.raises(ValueError, match=r"^templates of a: expected"):
        task_classes(Task(name="a", dataset="x"), Digits())


class Labels:
    """Source of labels that counts reads; None is a bad record."""

    name, split = "labels", "test"

    def __init__(self, labels):
        self.labels, self.reads = labels, 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        self.reads += 1
        if self.labels[index] is None:
            raise BadRecordError(f"bad record {index}")
        return {"label": self.labels[index]}


@pytest.mark.parametrize("labels", [[0], [None, 0], [None] * 999 + [0], [0] * 10**6])
def test_a_split_with_a_readable_record_is_accepted_after_a_few_reads(labels):
    source = Labels(labels)
    check_records(source)
    assert source.reads <= 16


@pytest.mark.parametrize(
    ("labels", "message"),
    [([], "^expected records in labels, split test, got none$"), ([None] * 40, "^bad record 0; the 16 records tried")],
)
def test_a_split_without_a_readable_record_is_named(labels, message):
    with pytest.raises(ValueError, match=message):
        check_records(Labels(labels))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2], "expected at least 3 class names for a, got 2: record 2 of labels, split test has the label 2"),
        ([None, 5], "at least 6 class names for a, got 2: record 1"),
        ([-1] * 100, "expected labels in labels, split test, for a, got none"),
        ([-1] * 50 + [7] + [-1] * 49, "at least 8 class names"),
    ],
)
def test_labels_without_class_names_are_named(labels, message):
    with pytest.raises(ValueError, match=message):
        check_labels(Labels(labels), 2, "a")


def test_all_labels_are_read_only_if_the_dataset_names_more_classes(monkeypatch):
    labels = [0] * 500 + [2] + [1] * 499
    source = Labels(labels)
    check_labels(source, 2, "a")
    assert source.reads <= 16
    monkeypatch.setattr("infcl_jax.evaluation.scoring.own_class_count", lambda source: 3)
    with pytest.raises(ValueError, match=r"record 500 .* has the label 2"):
        check_labels(source, 2, "a")
    check_labels(Labels([0, 1] * 500), 2, "a")  # a split with a part of the classes
