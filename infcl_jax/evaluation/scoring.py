"""Scores of evaluation tasks, from the features of their data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from infcl_jax.data import Classes, Source, classes
from infcl_jax.data.sources import is_captioned
from infcl_jax.evaluation.benchmark_source import WebdatasetSource
from infcl_jax.evaluation.examples import Show, classification_examples, most_confused, retrieval_examples
from infcl_jax.evaluation.few_shot import few_shot
from infcl_jax.evaluation.linear_probe import linear_probe
from infcl_jax.evaluation.metrics import (
    classification_metrics,
    macro_f1,
    mean_average_precision,
    worst_group_accuracy,
)
from infcl_jax.evaluation.probed import check_labels, check_records, own_class_count
from infcl_jax.evaluation.results import ExamplePrediction, TaskResult
from infcl_jax.evaluation.retrieval import retrieval_map, retrieval_recall
from infcl_jax.evaluation.tasks import (
    CLASSIFICATION_METRICS,
    GROUP_METRICS,
    PROBE_METRICS,
    Average,
    Task,
    task_classes,
)
from infcl_jax.evaluation.zero_shot import class_ranks
from infcl_jax.inference.features import Features, l2_normalize
from infcl_jax.inference.prompts import warn_of_equal_names
from infcl_jax.inference.search import top_k

_DIRECTIONS = ("image_to_text", "text_to_image")
_RETRIEVAL_METRICS = ("mean_r1", *(f"{way}_{name}" for way in _DIRECTIONS for name in ("r1", "r5", "r10", "map")))


@dataclasses.dataclass(frozen=True)
class OpenTask:
    """Task with its data.

    Attributes:
      task: the task.
      source: dataset; the same object for tasks on the same split.
      classes: class names and templates of zero-shot classification; None for other kinds.
      train: training samples of a probe; None for other kinds.
    """

    task: Task
    source: Source
    classes: Classes | None = None
    train: Source | None = None

    @property
    def retrieval(self) -> bool:
        """True for retrieval, which needs captions."""
        return self.classes is None and self.train is None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Datasets to encode."""
        return (self.source,) if self.train is None else (self.source, self.train)

    @property
    def multilabel(self) -> bool:
        """True if an image can have several classes."""
        return isinstance(self.source, WebdatasetSource) and self.source.type == "multilabel"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics."""
        if self.task.kind == "few_shot":
            return tuple(f"{shots}_shot{suffix}" for shots in self.task.shots for suffix in ("", "_std"))
        if self.train is None and self.retrieval:
            return _RETRIEVAL_METRICS
        if self.multilabel:
            return (self.main_metric,)
        names = dict.fromkeys(("top1", "top5", "mean_per_class_recall", self.main_metric))
        return tuple(name for name in names if name != "top5" or self.has_top5)

    @property
    def has_top5(self) -> bool:
        """False below six classes, where five predictions are always right."""
        count = own_class_count(self.source) if self.classes is None else len(self.classes.names)
        return count == 0 or count > 5

    @property
    def main_metric(self) -> str:
        """Metric that a suite averages."""
        default = "mean_r1" if self.retrieval else "mean_average_precision" if self.multilabel else "top1"
        return self.task.main_metric or default


def open_task(task: Task, source: Source, train: Source | None = None) -> OpenTask:
    """Check a task against its dataset.

    Args:
      task: the task.
      source: dataset of the results.
      train: training samples of a probe; None for other kinds.

    Raises:
      ValueError: the dataset lacks records, labels, captions, classes or groups, a label has no class name, the classes
        of `source` and `train` differ, or the main metric is unknown.
      BadRecordError: the records of a dataset cannot be read.
    """
    for dataset in (source,) if train is None else (source, train):
        check_records(dataset)
    if train is not None:
        _check_labels(task, source, train)
        opened = OpenTask(task, source, train=train)
        known: tuple[str, ...] = PROBE_METRICS
    elif is_retrieval(task, source):
        if not is_captioned(source):
            raise ValueError(
                f"expected a retrieval_dataset with captions, got {task.dataset!r}, which has only classes; add"
                " captions, or evaluate it as zero_shot_dataset"
            )
        opened, known = OpenTask(task, source), _RETRIEVAL_METRICS
    else:
        names = task_classes(task, source)
        warn_of_equal_names(names.names)
        opened = OpenTask(task, source, names)
        known = ("mean_average_precision",) if opened.multilabel else CLASSIFICATION_METRICS
        if not opened.multilabel:
            check_labels(source, len(names.names), task.name)
    known = tuple(name for name in known if name != "top5" or opened.has_top5)
    if opened.main_metric not in known:
        raise ValueError(f"expected main_metric of {task.name} to be one of {known}, got {task.main_metric!r}")
    if opened.main_metric in GROUP_METRICS and not isinstance(source, WebdatasetSource):
        raise ValueError(
            f"expected a dataset in the layout of clip_benchmark for {opened.main_metric} of {task.name}, got"
            f" {task.dataset}; its npy members have the groups"
        )
    return opened


def is_retrieval(task: Task, source: Source) -> bool:
    """Tell if a task is retrieval, which a captioned dataset without another kind is."""
    return task.kind == "retrieval" or (task.kind is None and is_captioned(source))


def _check_labels(task: Task, source: Source, train: Source) -> None:
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


def first_images(features: Features, count: int | None) -> Features:
    """Return the features of the first `count` images with their captions; None: of all."""
    if count is None or count >= len(features):
        return features
    texts = int(np.searchsorted(features.text_image, count))
    cut = {name: getattr(features, name)[:count] for name in ("image", "label", "index")}
    return Features(text=features.text[:texts], text_image=features.text_image[:texts], **cut)


def score_retrieval(opened: OpenTask, features: Features, mesh: Mesh, show: Show | None = None) -> TaskResult:
    """Measure retrieval in both directions.

    Args:
      opened: task with its data.
      features: features of the images and captions.
      mesh: mesh with an axis "data".
      show: decoder and transform of the images of the examples; None: no examples.

    Returns:
      `image_to_text_r<k>` and `text_to_image_r<k>` for k = 1, 5, 10, `mean_r1` of both directions, and
      `image_to_text_map` and `text_to_image_map`, as fractions.
    """
    inputs = features.image, features.text, mesh
    metrics = retrieval_recall(*inputs, text_image=features.text_image)
    metrics["mean_r1"] = (metrics["image_to_text_r1"] + metrics["text_to_image_r1"]) / 2
    metrics |= retrieval_map(*inputs, text_image=features.text_image)
    examples = () if show is None else retrieval_examples(opened.source, features, mesh, show)
    return _result(opened, "retrieval", metrics, len(features), examples)


def score_classification(
    opened: OpenTask, features: Features, classifier: np.ndarray, mesh: Mesh, show: Show | None = None
) -> TaskResult:
    """Measure zero-shot classification.

    Args:
      opened: task with its data.
      features: features of the images.
      classifier: [C, D], classifier vectors.
      mesh: mesh with an axis "data".
      show: decoder and transform of the images of the examples; None: no examples.

    Returns:
      `top1`, from six classes on `top5`, and `mean_per_class_recall`, with several classes per image
      `mean_average_precision`, and the main metric, as fractions.

    Raises:
      ValueError: labels or groups do not fit the classes.
    """
    assert opened.classes is not None
    if opened.multilabel:
        scores = l2_normalize(features.image) @ classifier.T
        metrics = {"mean_average_precision": mean_average_precision(scores, _targets(opened)[features.index])}
        return _result(opened, "multilabel", metrics, len(features))
    labeled = features.label >= 0
    ranks, labels = class_ranks(features.image, features.label, classifier, mesh), features.label[labeled]
    metrics = classification_metrics(ranks, labels)
    if opened.main_metric == "macro_f1":
        metrics["macro_f1"] = macro_f1(ranks < 1, top_k(features.image[labeled], classifier, 1, mesh)[1][:, 0], labels)
    if opened.main_metric in GROUP_METRICS:
        hits, groups = ranks < GROUP_METRICS[opened.main_metric], _groups(opened)[features.index][labeled]
        metrics[opened.main_metric] = worst_group_accuracy(hits, groups, opened.task.ignored_groups)
    result = _result(opened, "zero_shot", metrics, len(features))
    if show is None:
        return result
    examples = classification_examples(opened.source, features, opened.classes, classifier, mesh, show)
    confusions = most_confused(features, opened.classes, classifier, mesh)
    return dataclasses.replace(result, examples=examples, confusions=confusions)


def score_probe(opened: OpenTask, train: Features, test: Features, mesh: Mesh) -> TaskResult:
    """Train classifiers on the features of a dataset and test them.

    Args:
      opened: task of the kind "linear_probe" or "few_shot", with its data.
      train: features of the training images.
      test: features of the test images.
      mesh: mesh with an axis "data".

    Returns:
      Metrics of `linear_probe` or `few_shot`. The main metric of the latter is that of the largest number of shots.

    Raises:
      ValueError: there are too few classes or samples, see `linear_probe` and `few_shot`.
    """
    task, samples = opened.task, (train.image, train.label, test.image, test.label)
    options: dict[str, Any] = {"regularization": task.regularization, "metric": opened.main_metric, "mesh": mesh}
    try:
        if task.kind == "linear_probe":
            probe = linear_probe(*samples, **options)
            return _result(opened, "linear_probe", probe.metrics, len(test))
        few = few_shot(*samples, shots=task.shots, repeats=task.repeats, classifier=task.classifier, **options)
    except ValueError as error:
        raise ValueError(f"{task.name}: {error}") from error
    return _result(opened, "few_shot", few.metrics, len(test), main_metric=f"{max(task.shots)}_shot")


def average_results(average: Average, results: Mapping[str, TaskResult]) -> TaskResult:
    """Average the main metrics of a suite.

    Args:
      average: the suite.
      results: results by name; at least one is of the suite.

    Returns:
      Result of the name "suite/NAME", with the metric `average.metric`.
    """
    values = [result.metrics[result.main_metric] for name in average.tasks if (result := results.get(name))]
    name = average.metric(results.keys())
    metrics, count = {name: float(np.mean(values))}, len(values)
    return TaskResult(name=f"suite/{average.name}", kind="average", metrics=metrics, main_metric=name, images=count)


def _result(
    opened: OpenTask,
    kind: str,
    metrics: Mapping[str, float],
    images: int,
    examples: tuple[ExamplePrediction, ...] = (),
    main_metric: str | None = None,
) -> TaskResult:
    return TaskResult(
        name=opened.task.name,
        kind=kind,
        metrics={name: value for name, value in metrics.items() if name != "top5" or opened.has_top5},
        main_metric=main_metric or opened.main_metric,
        images=images,
        examples=examples,
    )


def _targets(opened: OpenTask) -> np.ndarray:
    """Read the classes of the images, [N, C]."""
    assert opened.classes is not None and isinstance(opened.source, WebdatasetSource)
    targets, expected = opened.source.arrays(), (len(opened.source), len(opened.classes.names))
    if targets.shape != expected:
        raise ValueError(f"expected npy members of {opened.source.name} to stack to {expected}, got {targets.shape}")
    return targets


def _groups(opened: OpenTask) -> np.ndarray:
    """Read the group of each image, the first number of its npy member."""
    assert isinstance(opened.source, WebdatasetSource)
    metadata = opened.source.arrays()
    return metadata.reshape(len(metadata), -1)[:, 0].astype(np.int64)
