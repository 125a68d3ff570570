"""Evaluation tasks: a dataset and what is measured on it."""

import collections
import contextlib
import dataclasses
import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from infcl_jax.data import Classes, Source, classes
from infcl_jax.data.sources import files, paths, splits, table
from infcl_jax.data.sources.labels import checked_prompts, class_templates
from infcl_jax.evaluation.benchmark_source import SHARD_COUNT, karpathy_images
from infcl_jax.evaluation.class_data import class_data, read_class_names, read_templates
from infcl_jax.evaluation.few_shot import SHOTS, check_options
from infcl_jax.evaluation.labeled import check_strength
from infcl_jax.evaluation.linear_probe import METRICS as PROBE_METRICS
from infcl_jax.evaluation.suites import IGNORED_GROUPS, KARPATHY_FILES, MAIN_METRICS, SUITES
from infcl_jax.inference.prompts import checked_template
from infcl_jax.runtime.processes import is_lead

PROBES = ("linear_probe", "few_shot")
TASK_KINDS = ("zero_shot", "retrieval", *PROBES)

_SPLIT = "test"  # of all benchmarks in the layout of clip_benchmark
# Kinds of task that use a field; the others use all kinds.
_KINDS_OF_FIELD: dict[str, tuple[str | None, ...]] = {
    "class_names": (None, "zero_shot"),
    "templates": (None, "zero_shot"),
    "ignored_groups": (None, "zero_shot"),
    "gallery": (None, "retrieval"),
    "train_split": PROBES,
    "regularization": PROBES,
    "shots": ("few_shot",),
    "repeats": ("few_shot",),
    "classifier": ("few_shot",),
}
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Evaluation task.

    Examples:
      >>> task = Task(name="cifar10", dataset="cifar10", class_names="cifar10", templates="cifar10")
      >>> task.split
      'test'

    Attributes:
      name: name of the results.
      dataset: dataset of `infcl_jax.evaluation.load_benchmark`.
      split: split of the dataset.
      kind: "zero_shot", "retrieval", "linear_probe" or "few_shot"; None: "retrieval" for a dataset with captions, else
        "zero_shot".
      class_names: names in label order, a file of `read_class_names`, or a name of `class_data` such as "imagenet1k";
        None: those of the dataset.
      templates: prompts with "{}" or "{c}" for the class name, the prompts of each class by name, a file of
        `read_templates`, or a name of `class_data`; None: those of the dataset.
      main_metric: metric that a suite averages; None: "top1", "mean_average_precision" or "mean_r1", by the dataset.
        "macro_f1" and "worst_group_top1" or "worst_group_top5" are measured only where they are the main metric. Groups
        are the first number in the `npy` member of each sample. Of "linear_probe" and "few_shot", "top1" or
        "mean_per_class_recall", which is also the metric of their search.
      ignored_groups: groups that do not count for the worst group.
      gallery: number of first images used for retrieval; None: all.
      train_split: split with the training samples of "linear_probe" and "few_shot".
      regularization: L2 strength of "linear_probe" and "few_shot"; None: see `linear_probe` and `few_shot`.
      shots: numbers of samples per class of "few_shot".
      repeats: number of draws of "few_shot".
      classifier: "logistic" or "ridge", the classifier of "few_shot".
    """

    name: str
    dataset: str
    split: str = _SPLIT
    kind: str | None = None
    class_names: tuple[str, ...] | str | None = None
    templates: tuple[str, ...] | tuple[tuple[str, tuple[str, ...]], ...] | str | None = None
    main_metric: str | None = None
    ignored_groups: tuple[int, ...] = ()
    gallery: int | None = None
    train_split: str = "train"
    regularization: float | None = None
    shots: tuple[int, ...] = SHOTS
    repeats: int = 3
    classifier: str = "logistic"

    def __post_init__(self) -> None:
        """Check the fields, and make tuples of lists."""
        for name in ("class_names", "templates", "ignored_groups", "shots"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.templates, Mapping):
            by_class = checked_prompts(self.templates, f"templates of task {self.name}")
            object.__setattr__(self, "templates", tuple(by_class.items()))  # hashable
        elif isinstance(self.templates, str) and "{" in self.templates:
            object.__setattr__(self, "templates", (self.templates,))
        if self.kind not in (None, *TASK_KINDS):
            raise ValueError(f"expected the kind of task {self.name} to be one of {TASK_KINDS}, got {self.kind!r}")
        for field in dataclasses.fields(self):
            kinds = _KINDS_OF_FIELD.get(field.name, (self.kind,))
            if self.kind not in kinds and getattr(self, field.name) != field.default:
                known = " or ".join(filter(None, kinds))
                raise ValueError(
                    f"expected {field.name} of task {self.name} only with the kind {known}, got {self.kind}"
                )
        for name in ("name", "dataset", "split", "train_split"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ValueError(f"expected a text as {name} of task {self.name!r}, got {value!r}")
        for name in ("class_names", "templates"):
            if not _are_texts(value := getattr(self, name)) and not (name == "templates" and _is_by_class(value)):
                raise ValueError(
                    f"expected {name} of task {self.name} to be texts, a file or a public data set, got {value!r}"
                )
        if isinstance(self.templates, tuple) and not _is_by_class(self.templates):
            origin = f"templates of task {self.name}"
            object.__setattr__(self, "templates", tuple(checked_template(str(text), origin) for text in self.templates))
        if self.gallery is not None and (not isinstance(self.gallery, int) or self.gallery < 1):
            raise ValueError(f"expected an integer gallery >= 1 in task {self.name}, got {self.gallery!r}")
        if self.kind in PROBES and self.train_split == self.split:
            raise ValueError(f"expected train_split of task {self.name} to differ from split, got {self.split} twice")
        check_strength(self.regularization, f"regularization of task {self.name}", positive=self.classifier == "ridge")
        check_options(self.shots, self.repeats, self.classifier)

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits of the results and of the training samples of a probe."""
        return (self.split, self.train_split) if self.kind in PROBES else (self.split,)


class Average(NamedTuple):
    """Suite, with the names of all its tasks, whose main metrics are averaged."""

    name: str
    tasks: tuple[str, ...]

    def metric(self, measured: Set[str]) -> str:
        """Return "average" if all tasks have results, else for example "average_of_30_of_38"."""
        count, size = len(measured & set(self.tasks)), len(self.tasks)
        return "average" if count == size else f"average_of_{count}_of_{size}"


def load_tasks(names: Sequence[str], data_dir: str | Path) -> tuple[list[Task], list[Average]]:
    """Find the tasks of the setting `evaluations`.

    Args:
      names: names of `suites.SUITES`; names of benchmarks, such as "cifar10" for the folder `wds_cifar10` in
        `data_dir`, also with a kind of `PROBES` such as "cifar10:linear_probe"; paths of Python files with a function
        `get_task()` that returns a `Task`; paths of datasets of `load_benchmark`, such as a folder with a subfolder per
        class, also with a kind. Their split is "test", else "validation", else all samples.
      data_dir: folder of the benchmarks.

    Returns:
      Tasks without repetition, and the suites among the names. The tasks of a suite that have no data are left out, and
      the lead process logs their names.

    Raises:
      FileNotFoundError: a file, a benchmark or all benchmarks of a suite are missing.
      ValueError: a file has no `get_task()`, two tasks have the same name, or a suite or file has a kind of `PROBES`.
    """
    tasks: dict[Task, None] = {}
    averages = []
    for name in dict.fromkeys(names):
        if name in SUITES:
            averages.append(Average(name, SUITES[name]))
            loaded = [task for member in SUITES[name] if (task := _benchmark(member, data_dir))]
            _report_missing(name, loaded, data_dir)
        elif name.endswith(".py"):
            loaded = [_task_of_file(name)]
        elif task := _benchmark(name, data_dir) or _task_of_path(name):
            loaded = [task]
        else:
            raise FileNotFoundError(
                f"no evaluation {name}: expected one of {', '.join(SUITES)}, a Python file, the path of a dataset, or"
                f" the folder {_folders(_split_kind(name)[0])[0]} with {_SPLIT}/{SHARD_COUNT} in {data_dir}"
            )
        tasks |= dict.fromkeys(loaded)
    check_names(tasks)
    return list(tasks), averages


def check_names(tasks: Iterable[Task], reserved: Iterable[str] = ()) -> None:
    """Check that tasks differ in their names, also from the reserved names of other results."""
    for name, count in collections.Counter([*reserved, *(task.name for task in tasks)]).items():
        if count > 1:
            raise ValueError(
                f"expected evaluations of different names, got {count} of the name {name}; leave out or rename one"
            )


def _benchmark(name: str, data_dir: str | Path) -> Task | None:
    """Return the task of a benchmark, or None if its data is missing."""
    benchmark, kind = _split_kind(name)
    if kind and (benchmark in SUITES or benchmark.endswith(".py")):
        raise ValueError(f"expected a benchmark with {kind}, got {name}; name single benchmarks, or a kind in the file")
    metric, ignored = MAIN_METRICS.get(benchmark), IGNORED_GROUPS.get(benchmark, ())
    if kind:
        metric, ignored = metric if metric in PROBE_METRICS else None, ()
    root = str(data_dir).rstrip("/")
    for folder in _folders(benchmark):
        if files.is_file(f"{root}/{folder}/{_SPLIT}/{SHARD_COUNT}"):
            return Task(name=name, dataset=f"{root}/{folder}", kind=kind, main_metric=metric, ignored_groups=ignored)
    for file in KARPATHY_FILES.get(benchmark, ()):
        if files.is_file(f"{root}/{file}"):
            return Task(name=name, dataset=f"{root}/{file}", kind=kind or "retrieval")
    return None


def _task_of_path(name: str) -> Task | None:
    """Return the task of a dataset given by its path, or None without one."""
    dataset, kind = _split_kind(name)
    path = os.path.expanduser(paths.split_options(dataset)[0]).rstrip("/")
    if not (os.path.exists(path) or files.is_remote(path) or files.has_pattern(path)):
        return None
    parent, _, base = path.rpartition("/")
    split = _evaluation_split(path)
    if kind and (split == "train" or splits.is_split(base)):
        raise ValueError(
            f"expected the splits train and test in {path} for {kind}, got one split; move the images into subfolders"
            " train and test, or name other splits in a Python file"
        )
    title = f"{files.name_of(parent)}/{base}" if splits.is_split(base) and parent else base
    return Task(name=":".join(filter(None, (title, kind))), dataset=dataset, split=split, kind=kind)


def _evaluation_split(path: str) -> str:
    """Return the split of a dataset that an evaluation uses; "train" for a dataset without splits."""
    if files.is_file(f"{path}/{_SPLIT}/{SHARD_COUNT}") or karpathy_images(path) is not None:
        return _SPLIT
    for split in (_SPLIT, "validation") if os.path.isdir(path) else ():
        with contextlib.suppress(ValueError):  # of a folder without this split
            splits.split_folder(path, split, (".tar", *table.EXTENSIONS))
            return split
    return "train"


def _split_kind(name: str) -> tuple[str, str | None]:
    """Split "cifar10:linear_probe" into benchmark and kind; the kind of "cifar10" is None."""
    benchmark, _, kind = name.rpartition(":")
    return (benchmark, kind) if kind in PROBES else (name, None)


def _folders(name: str) -> tuple[str, ...]:
    """List the names of a benchmark's folder."""
    base = name.removeprefix("fairness/").replace("/", "-")
    return f"wds_{base}", f"wds_{base}_{_SPLIT}", base


def _report_missing(suite: str, tasks: Sequence[Task], data_dir: str | Path) -> None:
    present = {task.name for task in tasks}
    missing = [name for name in SUITES[suite] if name not in present]
    if not present:
        raise FileNotFoundError(
            f"no benchmark of the suite {suite} in {data_dir}: expected folders such as {_folders(missing[0])[0]}"
        )
    if missing and is_lead():
        _logger.warning("%s: %d of %d without data: %s", suite, len(missing), len(SUITES[suite]), ", ".join(missing))


def _task_of_file(path: str) -> Task:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a Python file with get_task()")
    spec = importlib.util.spec_from_file_location(f"evaluation_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None  # true of a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        task = module.get_task()
    except ValueError as error:  # of a `Task`
        raise ValueError(f"cannot load {path}: {error}") from error
    except Exception as error:  # the code of the user raises any exception
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot load {path}: {reason}; expected a function get_task()") from error
    if not isinstance(task, Task):
        raise ValueError(f"expected get_task() of {path} to return an infcl_jax.evaluation.Task, got {task!r}")
    return task


def task_classes(task: Task, source: Source) -> Classes:
    """Return the class names and templates of a task, else of its dataset."""
    names, origin = task.class_names, f"templates of {task.name}"
    templates: Any = task.templates
    if isinstance(names, str):
        names = read_class_names(names) if _is_file_name(names) else class_data(names).classes
    if isinstance(templates, str):
        templates = read_templates(templates) if _is_file_name(templates) else class_data(templates).templates
    if templates is not None:
        own_names = classes(source).names if names is None else names
        templates = dict(templates) if _is_by_class(templates) else templates
        return Classes(own_names, class_templates(templates, own_names, origin))
    own = classes(source)
    names = own.names if names is None else names
    if isinstance(own.templates[0], str):
        return Classes(names, tuple(checked_template(text, origin) for text in own.templates))
    if len(names) != len(own.templates):
        raise ValueError(f"{origin}: expected prompts of all {len(names)} classes, got {len(own.templates)}")
    return Classes(names, own.templates)


def _are_texts(value: tuple[str, ...] | str | None) -> bool:
    """Return whether class names or templates are texts, a name, or not given."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(text, str) for text in value)
    return value is None or (isinstance(value, str) and bool(value))


def _is_by_class(templates: object) -> TypeGuard[tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return whether templates are pairs of a class and its prompts."""
    return isinstance(templates, tuple) and bool(templates) and isinstance(templates[0], tuple)


def _is_file_name(text: str) -> bool:
    return text.endswith((".txt", ".json")) or "/" in text
