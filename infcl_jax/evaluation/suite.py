"""Evaluation suite: zero-shot accuracy, retrieval recall, probes and split loss."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from infcl_jax.data import BadRecordError, Classes, Source, eval_batches
from infcl_jax.data.decode import decode_example
from infcl_jax.data.decode.api import ToImage, pixels
from infcl_jax.data.decode.pillow import MAX_PIXELS
from infcl_jax.data.parallelism import process_rows
from infcl_jax.data.reader import BAD_RECORDS, bad_record_limit, describe_limit
from infcl_jax.data.sources import Example
from infcl_jax.data.sources.labels import prompts
from infcl_jax.data.sources.sample_range import by_image
from infcl_jax.data.tokenizers import Tokenizer
from infcl_jax.data.transforms import SHORTEST_BICUBIC, Resize, resize_center_crop
from infcl_jax.evaluation.benchmark_source import load_benchmark
from infcl_jax.evaluation.contrastive import batch_loss, split_loss
from infcl_jax.evaluation.plots import plot_retrieval_grid
from infcl_jax.evaluation.results import TaskResult, flat_metrics
from infcl_jax.evaluation.scoring import (
    OpenTask,
    average_results,
    first_images,
    is_retrieval,
    open_task,
    score_classification,
    score_probe,
    score_retrieval,
)
from infcl_jax.evaluation.tasks import Task, check_names, load_tasks
from infcl_jax.inference.features import Batch, Features, TowerEncoder, encode_split
from infcl_jax.inference.prompts import prompt_ensembles
from infcl_jax.runtime.outputs import Outputs
from infcl_jax.runtime.processes import is_lead, union
from infcl_jax.runtime.progress import Progress
from infcl_jax.schema import Range, Section, setting

GRID_QUERIES = 8  # captions in the retrieval plot

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section, prefix="evaluation.", evaluated=True):
    """Settings of the evaluation suite.

    Examples:
      >>> config = EvaluationConfig(zero_shot_dataset="digits", zero_shot_split="zero_shot", batch_size=64)
    """

    data_dir: str | None = setting(None, "folder of the benchmarks in evaluations; None: data_dir")
    batch_size: int = setting(256, "images or captions encoded at a time, over all devices", Range(1, 2**17))
    retrieval_dataset: str | None = setting(None, "dataset for retrieval and the validation loss; None: skip both")
    retrieval_split: str = setting("validation", "split of evaluation.retrieval_dataset, such as validation")
    gallery: int | None = setting(None, "images of the split used for retrieval; None: all", Range(1))
    zero_shot_dataset: str | None = setting(None, "dataset for zero-shot classification; None: skip")
    zero_shot_split: str = setting("validation", "split of evaluation.zero_shot_dataset")


@dataclasses.dataclass(eq=False)
class Suite:
    """Evaluate a model on all devices of a mesh.

    Every process must call it, and every process gets the results. The images of a split are encoded once for all its
    tasks, whether they test or train on it, and the prompts of equal classes and templates once.

    Examples:
      >>> config = EvaluationConfig(retrieval_dataset="photos", retrieval_split="train")
      >>> suite = Suite(config, model, ByteTokenizer(36), image_size=16, data_dir="data", mesh=mesh)
      >>> results = suite(variables)

    Attributes:
      config: settings of the evaluation.
      model: a `CLIP` module.
      tokenizer: tokenizer of captions and prompts.
      image_size: side of the square input images, in pixels.
      data_dir: directory of the prepared datasets.
      mesh: mesh with an axis "data".
      implementation: backend of `infcl_jax.pairwise_lse` for the split loss; None: the best for the platform.
      train_batch_size: pairs per batch of `validation/batch_loss`; None: skip this loss.
      evaluations: further tasks and suites, see `load_tasks`.
      resize: resize of images before the center crop.
      say: function that prints a line of progress.
      check: function called before each batch of a split and each task, which may raise to end an evaluation. All
        processes call it equally often.
      max_bad_records: maximum number of bad records of each split and process, which are left out with a warning;
        see `infcl_jax.data.train_iterator`.
      max_image_pixels: largest number of pixels of an encoded image; larger ones are bad records.
      prefixes: sizes of feature prefixes to evaluate besides the whole features: zero-shot classification and
        retrieval get results of the name "task@size".

    Raises:
      FileNotFoundError: a dataset is not prepared.
      ValueError: a dataset, split or task is unknown, a dataset lacks what `open_task` expects, or the batch size
        is not a multiple of the number of processes.
    """

    config: EvaluationConfig
    model: nn.Module
    tokenizer: Tokenizer
    _: dataclasses.KW_ONLY
    image_size: int
    data_dir: str | Path
    mesh: Mesh
    implementation: str | None = None
    train_batch_size: int | None = None
    evaluations: Sequence[str] = ()
    resize: Resize = SHORTEST_BICUBIC
    say: Callable[[str], object] = lambda line: None
    check: Callable[[], None] = lambda: None
    max_bad_records: float | None = 0
    max_image_pixels: int = MAX_PIXELS
    prefixes: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Open the datasets."""
        config = self.config
        process_rows(config.batch_size, jax.process_index(), jax.process_count())
        load = functools.cache(lambda dataset, split: load_benchmark(dataset, split, self.data_dir))
        load_images = functools.cache(lambda dataset, split: by_image(load(dataset, split)))
        named, self._averages = load_tasks(self.evaluations, config.data_dir or self.data_dir)
        own = []
        if config.retrieval_dataset:
            dataset, split = config.retrieval_dataset, config.retrieval_split
            own.append(Task(name="retrieval", kind="retrieval", dataset=dataset, split=split, gallery=config.gallery))
        if config.zero_shot_dataset:
            dataset, split = config.zero_shot_dataset, config.zero_shot_split
            own.append(Task(name="zero_shot", kind="zero_shot", dataset=dataset, split=split))
        check_names([*own, *named], reserved=["validation"])
        self._tasks = [
            open_task(task, load_images(task.dataset, task.split))
            if is_retrieval(task, load(task.dataset, task.split))
            else open_task(task, *(load(task.dataset, split) for split in task.splits))
            for task in (*own, *named)
        ]
        self._validation = self._tasks[0] if config.retrieval_dataset else None

    @property
    def metric_names(self) -> list[str]:
        """Names of the results of all tasks and prefixes, sorted."""
        names = {name for name in self.chance if name.startswith("validation/")}
        for opened in self._tasks:
            sizes = [f"@{dim}" for dim in self.prefixes] if opened.train is None else []
            names |= {f"{opened.task.name}{size}/{metric}" for size in ("", *sizes) for metric in opened.metrics}
        if self._averages:
            measured = {opened.task.name for opened in self._tasks}
            names |= {f"suite/{average.name}/{average.metric(measured)}" for average in self._averages}
        return sorted(names)

    @property
    def chance(self) -> dict[str, float]:
        """Chance levels by name: ln(pairs) of training and validation losses in nats, 1 / classes of `top1`."""
        split_size = len(self._validation.source) if self._validation else 0
        size = self.train_batch_size
        pairs = {"loss": size, "validation/batch_loss": size, "validation/loss": split_size}
        losses = {name: math.log(number) for name, number in pairs.items() if number}
        named = [(opened.task.name, opened.classes) for opened in self._tasks if "top1" in opened.metrics]
        return losses | {f"{name}/top1": 1 / len(classes.names) for name, classes in named if classes is not None}

    def __call__(self, variables: Any, grid_path: str | Path | None = None) -> dict[str, float]:
        """Evaluate a model.

        Args:
          variables: Flax variables of the model on the mesh, such as `TrainState.variables`.
          grid_path: output file for a plot of retrieval results; None: no plot.

        Returns:
          Metrics of `results` by "task/metric", such as `zero_shot/top1` and `retrieval/image_to_text_r1`.
        """
        return flat_metrics(self.results(variables, grid_path))

    def results(
        self, variables: Any, grid_path: str | Path | None = None, *, examples: bool = False
    ) -> list[TaskResult]:
        """Evaluate a model by task.

        Args:
          variables: Flax variables of the model on the mesh.
          grid_path: output file for a plot of retrieval results; None: no plot.
          examples: whether the results have examples.

        Returns:
          Results of the tasks, see `score_classification`, `score_retrieval` and `score_probe`, then of the suites, see
          `average_results`. In nats, "validation" has `loss` of the whole retrieval split as one batch, and
          `batch_loss` of batches of `train_batch_size` pairs, if the split has that many. The losses pair each image
          with its first caption.

        Raises:
          BadRecordError: a split has more bad records than `max_bad_records`.
          ValueError: labels, groups or training samples do not fit a task.
        """
        results: dict[str, TaskResult] = {}
        classifiers = functools.cache(lambda classes, dim=None: self._classifier(classes, variables, dim))
        show = self._show if examples else None
        encoded: dict[int, Features] = {}
        last_use = {id(source): opened for opened in self._tasks for source in opened.sources}
        for opened in self._tasks:
            self.check()
            for source in opened.sources:
                if id(source) not in encoded:
                    encoded[id(source)] = self._encode(source, variables)
            name, features = opened.task.name, encoded[id(opened.source)]
            if opened.train is not None:
                results[name] = score_probe(opened, encoded[id(opened.train)], features, self.mesh)
            else:
                results[name] = self._score(opened, features, classifiers, show=show)
                for dim in (dim for dim in self.prefixes if dim < features.image.shape[1]):
                    cut = self._score(opened, features.prefix(dim), classifiers, dim)
                    results[f"{name}@{dim}"] = dataclasses.replace(cut, name=f"{name}@{dim}")
            if opened is self._validation:
                results["validation"] = self._losses(features, variables)
                if grid_path is not None and is_lead():
                    self._draw_grid(opened.source, first_images(features, opened.task.gallery), grid_path)
            for source in opened.sources:
                if last_use[id(source)] is opened:
                    del encoded[id(source)]  # features of a training split can take gigabytes
        done = sorted(results.values(), key=lambda result: result.name != "validation")
        return done + [average_results(average, results) for average in self._averages]

    def _score(
        self,
        opened: OpenTask,
        features: Features,
        classifiers: Callable[..., np.ndarray],
        dim: int | None = None,
        show: ToImage | None = None,
    ) -> TaskResult:
        if opened.classes is None:
            return score_retrieval(opened, first_images(features, opened.task.gallery), self.mesh, show)
        return score_classification(opened, features, classifiers(opened.classes, dim), self.mesh, show)

    def _losses(self, features: Features, variables: Any) -> TaskResult:
        scale, _ = self.model.apply(variables, method="logit_scale_and_bias")
        inputs = features.image, features.first_text, float(scale), self.mesh
        metrics = {"loss": split_loss(*inputs, self.implementation)}
        size = self.train_batch_size
        if size is not None and size <= len(features):
            metrics["batch_loss"] = batch_loss(*inputs, size, self.implementation)
        return TaskResult(name="validation", kind="loss", metrics=metrics, main_metric="loss", images=len(features))

    def _show(self, example: Example) -> np.ndarray:
        """Decode an image and transform it for the model."""
        return resize_center_crop(pixels(example, self.max_image_pixels), self.image_size, self.resize)

    def _classifier(self, classes: Classes, variables: Any, dim: int | None) -> np.ndarray:
        size, encode = self.config.batch_size, TowerEncoder(self.model, "encode_text", dim)
        texts = [prompts(classes, label) for label in range(len(classes.names))]
        return prompt_ensembles(encode, variables, self.tokenizer, texts, self.mesh, size)

    def _encode(self, source: Source, variables: Any) -> Features:
        texts = any(opened.source is source and opened.kind == "retrieval" for opened in self._tasks)
        batches = eval_batches(
            source,
            tokenizer=self.tokenizer if texts else None,
            image_size=self.image_size,
            batch_size=self.config.batch_size,
            resize=self.resize,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            skip_bad=True,
            max_image_pixels=self.max_image_pixels,
        )
        progress = Progress(f"{source.name} {source.split}", len(batches), "batches", self.say)
        readable = self._readable(source, batches, progress)
        encode_text = TowerEncoder(self.model, "encode_text") if texts else None
        return encode_split(TowerEncoder(self.model, "encode_image"), encode_text, variables, readable, self.mesh)

    def _readable(self, source: Source, batches: Iterable[Batch], progress: Progress) -> Iterator[Batch]:
        """Count the bad records of batches up to their limit, and log them in one line."""
        bad: list[str] = []  # messages
        limit = bad_record_limit(self.max_bad_records, source)
        for batch in batches:
            self.check()
            bad += batch[BAD_RECORDS]["message"].tolist()
            if len(bad) > limit and jax.process_count() == 1:
                break
            yield batch  # to the end, since other processes wait in collectives; then all raise
            progress.add()
        if ranks := union([jax.process_index()] if len(bad) > limit else []):
            elsewhere = f"bad records of {source.name}, split {source.split}, on process {ranks[0]}"
            record = bad[limit] if len(bad) > limit else elsewhere
            raise BadRecordError(
                f"{record}; more than the {limit} bad records of a split that {describe_limit(self.max_bad_records)}"
                " allows, check the data"
            )
        if bad:
            _logger.warning(
                "%d of %d images of %s, split %s, cannot be read and are left out; first: %s",
                *(len(bad), len(source), source.name, source.split, bad[0]),
            )

    def _draw_grid(self, source: Source, features: Features, path: str | Path) -> None:
        text = features.first_text[:GRID_QUERIES]
        captions = [source[int(i)]["captions"][0] for i in features.index[:GRID_QUERIES]]
        images = _Images(source, features.index, functools.partial(pixels, max_pixels=self.max_image_pixels))
        Outputs().attempt(path, lambda: plot_retrieval_grid(captions, images, text @ features.image.T, path))


@dataclasses.dataclass(frozen=True)
class _Images(Sequence[np.ndarray]):
    """Images of a source at int64 indices [n], read on access."""

    source: Source
    indices: np.ndarray
    to_image: ToImage

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, row: Any) -> Any:
        return decode_example(self.source, int(self.indices[row]), to_image=self.to_image)["image"]
