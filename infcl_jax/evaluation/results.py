"""Results of evaluation tasks."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class ExamplePrediction:
    """Image with its best-ranked texts, for a report.

    Examples:
      >>> thumbnail = np.zeros((16, 16, 3), np.uint8)
      >>> example = ExamplePrediction(thumbnail, ("cat",), ("dog", "cat"), (0.31, 0.29), correct=False)

    Attributes:
      image: uint8 [S, S, 3], the image as the model sees it.
      expected: class name, or the captions of the image.
      predicted: best-ranked class names or captions, best first.
      similarity: cosine similarity of each entry of `predicted`.
      correct: whether the first entry of `predicted` is the class, or a caption, of the image.
    """

    image: np.ndarray
    expected: tuple[str, ...]
    predicted: tuple[str, ...]
    similarity: tuple[float, ...]
    correct: bool


@dataclasses.dataclass(frozen=True)
class Confusion:
    """Pair of classes that a classifier confuses, with the number of images."""

    expected: str
    predicted: str
    images: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TaskResult:
    """Result of one evaluation task, or the average of a suite.

    Examples:
      >>> result = TaskResult(name="cifar10", kind="zero_shot", metrics={"top1": 0.9}, main_metric="top1", images=10)
      >>> result.metrics[result.main_metric]
      0.9

    Attributes:
      name: name of the task or suite, such as "imagenet1k".
      kind: "zero_shot", "multilabel", "retrieval", "linear_probe", "few_shot", "loss" or "average".
      metrics: values by name, such as {"top1": 0.631, "top5": 0.87}; fractions, except for losses in nats.
      main_metric: name in `metrics` of the value that a suite averages, such as "top1".
      images: number of images; for an average, number of its tasks.
      examples: mistakes and correct predictions, at most a dozen; for retrieval, nearest captions.
      confusions: most frequent confusions of a classification with examples, at most ten.
    """

    name: str
    kind: str
    metrics: Mapping[str, float]
    main_metric: str
    images: int
    examples: tuple[ExamplePrediction, ...] = ()
    confusions: tuple[Confusion, ...] = ()


def flat_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Return the metrics of results by "task/metric".

    Examples:
      >>> result = TaskResult(name="cifar10", kind="zero_shot", metrics={"top1": 0.9}, main_metric="top1", images=10)
      >>> flat_metrics([result])
      {'cifar10/top1': 0.9}
    """
    return {f"{result.name}/{name}": value for result in results for name, value in result.metrics.items()}
