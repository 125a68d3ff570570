"""Evaluation tasks with their data: checks, and scores from features."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from infcl_jax.data import BadRecordError, Classes, Source, classes
from infcl_jax.data.decode.api import ToImage
from infcl_jax.data.sources import is_captioned
from infcl_jax.data.sources.base import describe
from infcl_jax.evaluation.benchmark_source import WebdatasetSource
from infcl_jax.evaluation.examples import classification_examples, retrieval_examples, spread
from infcl_jax.evaluation.few_shot import few_shot
from infcl_jax.evaluation.linear_probe import METRICS as PROBE_METRICS
from infcl_jax.evaluation.linear_probe import linear_probe
from infcl_jax.evaluation.metrics import (
    classification_metrics,
    macro_f1,
    mean_average_precision,
    worst_group_accuracy,
)
from infcl_jax.evaluation.results import TaskResult
from infcl_jax.evaluation.retrieval import class_ranks, retrieval_map, retrieval_recall
from infcl_jax.evaluation.tasks import PROBES, Average, Task, task_classes
from infcl_jax.inference.features import Features, l2_normalize
from infcl_jax.inference.prompts import warn_of_equal_names
from infcl_jax.inference.search import top_k

_PROBED = 16  # records of a split that are read, and not decoded, before a run starts
_GROUP_METRICS = {"worst_group_top1": 1, "worst_group_top5": 5}  # cutoff k by main metric
_DIRECTIONS = ("image_to_text", "text_to_image")
# Main metrics by kind of the results, the default first.
_MAIN_METRICS: dict[str, tuple[str, ...]] = {
    "retrieval": ("mean_r1", *(f"{way}_{name}" for way in _DIRECTIONS for name in ("r1", "r5", "r10", "map"))),
    "multilabel": ("mean_average_precision",),
    "zero_shot": ("top1", "top5", "mean_per_class_recall", "macro_f1", *_GROUP_METRICS),
    **dict.fromkeys(PROBES, PROBE_METRICS),
}


@dataclasses.dataclass(frozen=True)
class OpenTask:
    """Task with its data."""

    task: Task
    source: Source  # the same object for tasks on the same split
    classes: Classes | None = None  # of zero-shot classification
    train: Source | None = None  # training samples of a probe

    @property
    def kind(self) -> str:
        """Kind of the results, see `TaskResult`."""
        if self.train is not None:
            return self.task.kind
        if self.classes is None:
            return "retrieval"
        several = isinstance(self.source, WebdatasetSource) and self.source.type == "multilabel"
        return "multilabel" if several else "zero_shot"

    @property
    def sources(self) -> tuple[Source, ...]:
        """Datasets to encode."""
        return (self.source,) if self.train is None else (self.source, self.train)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics."""
        if self.kind == "few_shot":
            return tuple(f"{shots}_shot{suffix}" for shots in self.task.shots for suffix in ("", "_std"))
        if self.kind in ("retrieval", "multilabel"):
            return self.main_metrics
        names = dict.fromkeys(("top1", "top5", "mean_per_class_recall", self.main_metric))
        return tuple(name for name in names if name != "top5" or self.has_top5)

    @property
    def has_top5(self) -> bool:
        """False below six classes, where five predictions are always right."""
        count = own_class_count(self.source) if self.classes is None else len(self.classes.names)
        return count == 0 or count > 5

    @property
    def main_metrics(self) -> tuple[str, ...]:
        """Metrics that a suite can average, the default first."""
        return tuple(name for name in _MAIN_METRICS[self.kind] if name != "top5" or self.has_top5)

    @property
    def main_metric(self) -> str:
        """Metric that a suite averages."""
        return self.task.main_metric or self.main_metrics[0]

    def result(self, metrics: Mapping[str, float], images: int, **shown: Any) -> TaskResult:
        """Return a result; the main metric of few-shot classification has the most shots."""
        main_metric = f"{max(self.task.shots)}_shot" if self.kind == "few_shot" else self.main_metric
        metrics = {name: value for name, value in metrics.items() if name != "top5" or self.has_top5}
        name, kind = self.task.name, self.kind
        return TaskResult(name=name, kind=kind, metrics=metrics, main_metric=main_metric, images=images, **shown)


def open_task(task: Task, source: Source, train: Source | None = None) -> OpenTask:
    """Check a task against its dataset, and a probe also against its training samples.

    Raises:
      ValueError: the dataset lacks records, labels, captions, classes or groups, a label has no class name, the classes
        of `source` and `train` differ, or the main metric is unknown.
      BadRecordError: the records of a dataset cannot be read.
    """
    opened = OpenTask(task, source, train=train)
    for dataset in opened.sources:
        check_records(dataset)
    if train is not None:
        _check_train_labels(task, source, train)
    elif not is_retrieval(task, source):
        opened = dataclasses.replace(opened, classes=task_classes(task, source))
        warn_of_equal_names(opened.classes.names)
        if opened.kind == "zero_shot":
            check_labels(source, len(opened.classes.names), task.name)
    elif not is_captioned(source):
        raise ValueError(
            f"expected a retrieval_dataset with captions, got {task.dataset!r}, which has only classes; add"
            " captions, or evaluate it as zero_shot_dataset"
        )
    if opened.main_metric not in opened.main_metrics:
        known = opened.main_metrics
        raise ValueError(f"expected main_metric of {task.name} to be one of {known}, got {task.main_metric!r}")
    if opened.main_metric in _GROUP_METRICS and not isinstance(source, WebdatasetSource):
        raise ValueError(
            f"expected a dataset in the layout of clip_benchmark for {opened.main_metric} of {task.name}, got"
            f" {task.dataset}; its npy members have the groups"
        )
    return opened


def is_retrieval(task: Task, source: Source) -> bool:
    """Tell if a task is retrieval, which a captioned dataset without another kind is."""
    return task.kind == "retrieval" or (task.kind is None and is_captioned(source))


def _check_train_labels(task: Task, source: Source, train: Source) -> None:
    """Check that training and test samples have labels of the same classes."""
    if isinstance(source, WebdatasetSource):
        if source.type != "classification":
            raise ValueError(f"expected one label per image for {task.name}, got a dataset of type {source.type}")
        return  # labels are integers, the same in all splits
    names, train_names = classes(source).names, classes(train).names
    if names != train_names:
        raise ValueError(
            f"expected the same classes in the splits {task.train_split} and {task.split} of {task.dataset}, got"
            f" {len(train_names)} and {len(names)} classes or another order; add a classes.txt"
        )


def check_records(source: Source) -> None:
    """Check that a few records of a split can be read.

    Raises:
      ValueError: the split is empty.
      BadRecordError: none of them can be read; the message names the first.
    """
    if not len(source):
        raise ValueError(f"expected records in {source.name}, split {source.split}, got none")
    errors = []
    for index in spread(len(source), _PROBED).tolist():
        try:
            source[index]
            return
        except BadRecordError as error:
            errors.append(error)
    raise BadRecordError(f"{errors[0]}; the {len(errors)} records tried, across the split, are all bad")


def check_labels(source: Source, names: int, task: str) -> None:
    """Check that the labels of a readable dataset have class names.

    Reads a few records, and all of them if the dataset has more classes than there are names or those have no label.

    Raises:
      ValueError: a label has no class name, or no record has a label.
    """
    labeled = _has_labels(source, spread(len(source), _PROBED).tolist(), names, task)
    if not labeled or own_class_count(source) > names:
        labeled = _has_labels(source, range(len(source)), names, task)
    if not labeled:
        raise ValueError(
            f"expected labels in {source.name}, split {source.split}, for {task}, got none; use a split with classes"
        )


def _has_labels(source: Source, indices: Iterable[int], names: int, task: str) -> bool:
    """Check the labels of records; return whether there is one."""
    labeled = False
    for index in indices:
        try:
            label = source[index]["label"]
        except BadRecordError:
            continue
        if label >= names:
            raise ValueError(
                f"expected at least {label + 1} class names for {task}, got {names}: {describe(source, index)} has the"
                f" label {label}"
            )
        labeled = labeled or label >= 0
    return labeled


def own_class_count(source: Source) -> int:
    """Return the number of classes that a dataset names; 0 for one without names."""
    try:
        return len(classes(source).names)
    except (ValueError, FileNotFoundError):
        return 0


def first_images(features: Features, count: int | None) -> Features:
    """Return the features of the first `count` images with their captions; None: of all."""
    if count is None or count >= len(features):
        return features
    texts = int(np.searchsorted(features.text_image, count))
    cut = {name: getattr(features, name)[:count] for name in ("image", "label", "index")}
    return Features(text=features.text[:texts], text_image=features.text_image[:texts], **cut)


def score_retrieval(opened: OpenTask, features: Features, mesh: Mesh, show: ToImage | None = None) -> TaskResult:
    """Measure retrieval in both directions; without `show`, there are no examples.

    Returns:
      `image_to_text_r<k>` and `text_to_image_r<k>` for k = 1, 5, 10, `mean_r1` of both directions, and
      `image_to_text_map` and `text_to_image_map`, as fractions.
    """
    inputs = features.image, features.text, mesh
    metrics = retrieval_recall(*inputs, text_image=features.text_image)
    metrics["mean_r1"] = (metrics["image_to_text_r1"] + metrics["text_to_image_r1"]) / 2
    metrics |= retrieval_map(*inputs, text_image=features.text_image)
    examples = () if show is None else retrieval_examples(opened.source, features, mesh, show)
    return opened.result(metrics, len(features), examples=examples)


def score_classification(
    opened: OpenTask, features: Features, classifier: np.ndarray, mesh: Mesh, show: ToImage | None = None
) -> TaskResult:
    """Measure zero-shot classification with classifier vectors [C, D]; without `show`, there are no examples.

    Returns:
      `top1`, from six classes on `top5`, and `mean_per_class_recall`, with several classes per image
      `mean_average_precision`, and the main metric, as fractions.

    Raises:
      ValueError: labels or groups do not fit the classes.
    """
    assert opened.classes is not None
    if opened.kind == "multilabel":
        scores, targets = l2_normalize(features.image) @ classifier.T, _arrays(opened.source)
        if targets.shape != (expected := (len(opened.source), len(opened.classes.names))):
            raise ValueError(
                f"expected npy members of {opened.source.name} to stack to {expected}, got {targets.shape}"
            )
        metrics = {"mean_average_precision": mean_average_precision(scores, targets[features.index])}
        return opened.result(metrics, len(features))
    labeled = features.label >= 0
    ranks, labels = class_ranks(features.image, features.label, classifier, mesh), features.label[labeled]
    metrics = classification_metrics(ranks, labels)
    if opened.main_metric == "macro_f1":
        metrics["macro_f1"] = macro_f1(ranks < 1, top_k(features.image[labeled], classifier, 1, mesh)[1][:, 0], labels)
    if opened.main_metric in _GROUP_METRICS:
        metadata = _arrays(opened.source)
        groups = metadata.reshape(len(metadata), -1)[:, 0].astype(np.int64)[features.index][labeled]
        hits = ranks < _GROUP_METRICS[opened.main_metric]
        metrics[opened.main_metric] = worst_group_accuracy(hits, groups, opened.task.ignored_groups)
    if show is None:
        return opened.result(metrics, len(features))
    names = opened.classes.names
    examples, confusions = classification_examples(opened.source, features, names, classifier, mesh, show)
    return opened.result(metrics, len(features), examples=examples, confusions=confusions)


def score_probe(opened: OpenTask, train: Features, test: Features, mesh: Mesh) -> TaskResult:
    """Train the classifiers of `linear_probe` or `few_shot`, and test them."""
    task, samples = opened.task, (train.image, train.label, test.image, test.label)
    options: dict[str, Any] = {"regularization": task.regularization, "metric": opened.main_metric, "mesh": mesh}
    try:
        if task.kind == "linear_probe":
            return opened.result(linear_probe(*samples, **options).metrics, len(test))
        few = few_shot(*samples, shots=task.shots, repeats=task.repeats, classifier=task.classifier, **options)
    except ValueError as error:
        raise ValueError(f"{task.name}: {error}") from error
    return opened.result(few.metrics, len(test))


def average_results(average: Average, results: Mapping[str, TaskResult]) -> TaskResult:
    """Average the main metrics of a suite, of which at least one task has a result."""
    values = [result.metrics[result.main_metric] for name in average.tasks if (result := results.get(name))]
    name = average.metric(results.keys())
    metrics, count = {name: float(np.mean(values))}, len(values)
    return TaskResult(name=f"suite/{average.name}", kind="average", metrics=metrics, main_metric=name, images=count)


def _arrays(source: Source) -> np.ndarray:
    """Read the `npy` members of a benchmark, such as classes [N, C] or groups in [N, 0]."""
    assert isinstance(source, WebdatasetSource)
    return source.arrays()
