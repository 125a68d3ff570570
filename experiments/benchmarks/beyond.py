"""Train with several positives, a teacher, Matryoshka prefixes and either decoder, over several seeds.

    python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=data
    python -m experiments.benchmarks.beyond --config=configs/quickstart.py --workdir=runs/beyond \
        --config.batch_size=1024 [--steps=1000] [--seeds=0,1,2] [--questions=positives,distillation,matryoshka,decoders]

| question | runs of each seed | picture |
| --- | --- | --- |
| positives | positives `pair` and `caption` | `positives.png` |
| distillation | a small student with and without a larger teacher, which is trained once | `distillation.png` |
| matryoshka | with and without `matryoshka`, evaluated at every prefix | `matryoshka.png` |
| decoders | the training images as JPEG files, decoded by Pillow and by a GPU, which it needs | `decoders.png` |

Each run trains in a folder of its own and then writes its results there, so the same command continues an interrupted
series. `beyond.json` has the last evaluation of every run. A run without `matryoshka` is that with positives `pair`.
A batch of 1,024 shapes has about 870 different captions and 0.7 positives by caption for each pair in addition to its
own; a batch of 256 has 0.3.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from experiments import command, command_line
from experiments.benchmarks import photographs
from infcl_jax import load, run, train
from infcl_jax.data import Example, Source
from infcl_jax.data.decode.api import pixels
from infcl_jax.run.build import start_devices
from infcl_jax.runtime.console import say
from infcl_jax.settings import RunConfig, parse_overrides, with_changes

QUESTIONS = ("positives", "distillation", "matryoshka", "decoders")
_STEPS = flags.DEFINE_integer("steps", None, "Steps of each run. Default: those of the configuration.", lower_bound=1)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Training seeds.")
_QUESTIONS = flags.DEFINE_list("questions", list(QUESTIONS[:-1]), "Questions to answer; decoders need a GPU.")
_PREFIXES = flags.DEFINE_list("prefixes", ["6", "12", "24", "48", "96"], "Prefix sizes; the last is the feature size.")
_TEACHER = flags.DEFINE_string(
    "teacher",
    "vision.width=192,vision.layers=6,vision.heads=6,text.width=128,text.layers=4,text.heads=4",
    "Changes of the model of the teacher.",
)
_STUDENT = flags.DEFINE_string(
    "student",
    "vision.width=48,vision.layers=1,vision.heads=2,text.width=32,text.layers=1,text.heads=2",
    "Changes of the model of the student.",
)
_WEIGHT = flags.DEFINE_float("weight", 1.0, "Weight of the distillation.", lower_bound=0)

_JPEG_QUALITY, _TAR_FILES = 95, 8
RESULTS_FILE, RUN_FILE = "beyond.json", "last_evaluation.json"
METRICS = {
    "zero_shot/top1": "zero-shot top-1",
    "retrieval/image_to_text_r1": "image to text R@1",
    "retrieval/text_to_image_r1": "text to image R@1",
}

Results = dict[str, list[dict[str, float]]]  # of each seed, by the name of the variant


def answer(config: RunConfig, questions: Sequence[str], seeds: Sequence[int], folder: Path) -> dict[str, Results]:
    """Train the runs of each question, plot their results and record them."""
    asked = {
        "positives": _positives,
        "distillation": _distillation,
        "matryoshka": _matryoshka,
        "decoders": _decoders,
    }
    answers: dict[str, Results] = {}
    for question in questions:
        answers[question] = asked[question](config, seeds, folder)
        for name, results in answers[question].items():
            metrics = [metric for metric in METRICS if all(metric in result for result in results)]
            say(f"{question}, {name}: " + "  ".join(_summary(metric, results) for metric in metrics))
    path = folder / RESULTS_FILE
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | answers, indent=2) + "\n")
    return answers


def _positives(config: RunConfig, seeds: Sequence[int], folder: Path) -> Results:
    """Compare one positive with all pairs of the same caption."""
    results = _compared(config, {name: {"positives": name} for name in ("pair", "caption")}, seeds, folder)
    plot_bars(results, folder / "positives.png")
    return results


def _distillation(config: RunConfig, seeds: Sequence[int], folder: Path) -> Results:
    """Compare a student with and without a teacher."""
    teacher = trained(config, _model(config, _TEACHER.value), folder / "teacher")
    small = _model(config, _STUDENT.value)
    distill = {"distill.teacher": str(folder / "teacher"), "distill.weight": _WEIGHT.value}
    results = _compared(config, {"student": small, "distilled": small | distill}, seeds, folder)
    results["teacher"] = [teacher]
    plot_bars(results, folder / "distillation.png")
    return results


def _matryoshka(config: RunConfig, seeds: Sequence[int], folder: Path) -> Results:
    """Compare the prefixes of features trained with and without Matryoshka."""
    sizes = command_line.integers("prefixes", _PREFIXES.value)
    changes = {"matryoshka": sizes}
    results: Results = {"matryoshka": [], "whole features": []}
    for seed in seeds:
        results["matryoshka"].append(trained(config, changes | {"seed": seed}, folder / f"matryoshka-{seed}"))
        trained(config, {"positives": "pair", "seed": seed}, folder / f"pair-{seed}")
        results["whole features"].append(evaluated(config, changes, folder / f"pair-{seed}", "prefixes.json"))
    plot_prefixes(results, sizes, folder / "matryoshka.png")
    return results


def _decoders(config: RunConfig, seeds: Sequence[int], folder: Path) -> Results:
    """Compare two decoders of the same files."""
    dataset = write_jpeg(run.training_source(config), folder / "jpeg")
    variants = {decode: {"dataset": dataset, "decode": decode} for decode in ("pillow", "nvimgcodec")}
    results = _compared(config, variants, seeds, folder)
    plot_bars(results, folder / "decoders.png")
    return results


def _compared(
    config: RunConfig, variants: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], folder: Path
) -> Results:
    """Train each variant, given by its changed settings, with all seeds."""
    return {
        name: [trained(config, {**changes, "seed": seed}, folder / f"{name}-{seed}") for seed in seeds]
        for name, changes in variants.items()
    }


def write_jpeg(source: Source, folder: Path) -> str:
    """Write images and captions to tar files of JPEG files with full color resolution; return the dataset."""

    def encode(example: Example) -> photographs.Sample:
        image = Image.fromarray(pixels(example))
        return photographs.encode(image, quality=_JPEG_QUALITY, subsampling=0), example["caption"]

    return photographs.write("tar", folder, [encode(source[index]) for index in range(len(source))], _TAR_FILES)


def trained(config: RunConfig, changes: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """Train a run, or continue it; return its last evaluation."""
    path = folder / RUN_FILE
    if not path.is_file():
        say(f"training {folder}")
        results = train(with_changes(config, changes), folder)
        path.write_text(json.dumps(results, indent=2) + "\n")
    return json.loads(path.read_text())


def evaluated(config: RunConfig, changes: Mapping[str, Any], folder: Path, name: str) -> dict[str, float]:
    """Evaluate a trained run with changed settings.

    The results are stored as file `name` of its folder.
    """
    path = folder / name
    if not path.is_file():
        settings = with_changes(config, changes)
        mesh = start_devices(settings)
        suite = run.evaluation_suite(settings, mesh)
        path.write_text(json.dumps(suite(load(folder, mesh=mesh).variables), indent=2) + "\n")
    return json.loads(path.read_text())


def _model(config: RunConfig, changes: str) -> dict[str, str]:
    """Return the setting of the model with further overrides."""
    overrides = parse_overrides(config.model_overrides) | parse_overrides(changes)
    return {"model_overrides": ",".join(f"{name}={value!r}" for name, value in overrides.items())}


def _summary(metric: str, results: Sequence[Mapping[str, float]]) -> str:
    low, mean, high = (100 * f([result[metric] for result in results]) for f in (min, statistics.mean, max))
    return f"{METRICS[metric]} {mean:.1f} % ({low:.1f} to {high:.1f})"


def plot_bars(results: Results, path: Path) -> None:
    """Plot each metric: means as bars, seeds as dots."""
    figure = Figure(figsize=(4 * len(METRICS), 4))
    for axes, (metric, label) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        values = {name: [100 * result[metric] for result in runs] for name, runs in results.items()}
        axes.bar(list(values), [statistics.mean(v) for v in values.values()], width=0.6, alpha=0.5)
        for position, v in enumerate(values.values()):
            axes.plot([position] * len(v), v, "k.", markersize=5)
        _zoom(axes, [value for v in values.values() for value in v])
        axes.set(ylabel=f"{label}, %")
    _save(figure, path)


def plot_prefixes(results: Results, sizes: Sequence[int], path: Path) -> None:
    """Plot each metric over the prefixes: seeds thin, means bold."""
    figure = Figure(figsize=(4.5 * len(METRICS), 4))
    for axes, (metric, label) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        for color, (name, runs) in enumerate(results.items()):
            seeds = [[100 * result[at_prefix(metric, size, sizes)] for size in sizes] for result in runs]
            for values in seeds:
                axes.plot(sizes, values, color=f"C{color}", linewidth=0.7, alpha=0.6)
            means = [statistics.mean(column) for column in zip(*seeds, strict=True)]
            axes.plot(sizes, means, color=f"C{color}", linewidth=2, marker="o", markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set(xlabel="features of the prefix", ylabel=f"{label}, %")
    axes.legend()
    _save(figure, path)


def at_prefix(metric: str, size: int, sizes: Sequence[int]) -> str:
    """Return the name of a metric at a prefix, such as "zero_shot@24/top1"."""
    task, _, score = metric.partition("/")
    return metric if size == sizes[-1] else f"{task}@{size}/{score}"


def _zoom(axes: Axes, values: Sequence[float]) -> None:
    """Start the axis below the smallest value, so that seeds are told apart."""
    margin = max(2.0, max(values) - min(values))
    axes.set_ylim(max(0.0, min(values) - margin), min(100.0, max(values) + margin / 2))


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    say(f"wrote {path}")


def answer_from_flags() -> None:
    """Answer the questions of the flags."""
    folder, config = Path(command.given_workdir()), command.chosen_config()
    if _STEPS.value is not None:
        warmup = min(config.optimizer.warmup_steps, max(0, _STEPS.value // 10))
        changes = {"total_steps": _STEPS.value, "eval_every": 0, "optimizer.warmup_steps": warmup}
        config = with_changes(config, changes)
    start_devices(config)
    folder.mkdir(parents=True, exist_ok=True)
    questions = command_line.names("questions", _QUESTIONS.value, QUESTIONS)
    answer(config, questions, [int(seed) for seed in _SEEDS.value], folder)


if __name__ == "__main__":
    command.run(answer_from_flags)
