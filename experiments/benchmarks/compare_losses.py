"""Compare the accuracy of several losses over several seeds.

    python -m experiments.benchmarks.compare_losses --config=configs/fastclip.py:quickstart --workdir=runs/losses \
        --seeds=0,1,2 --compare=clip --compare=fastclip_v3 --compare=clip,optimizer.temperature_learning_rate=None

The last `--compare` is CLIP as usual: the temperature has the learning rate of the other parameters. Each run trains by
`experiments.train` in its own folder, so the same command continues an interrupted comparison. Writes `losses.json`
with the last evaluation of every run, and `losses.png` with accuracy and recall over the steps (thin: each seed, bold:
their mean). Takes half an hour on two CPU cores.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments import command
from infcl_jax import train
from infcl_jax.console import say
from infcl_jax.settings import parse_overrides
from infcl_jax.training import METRICS_FILE, read_metrics

_COMPARED = flags.DEFINE_multi_string(
    "compare", ["clip", "fastclip_v3"], "A loss with changed settings: loss,key=value,..."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Training seeds.")

RESULTS_FILE, PICTURE_FILE = "losses.json", "losses.png"
METRICS = {
    "zero_shot/top1": "zero-shot top-1",
    "retrieval/image_to_text_r1": "image to text R@1",
    "retrieval/text_to_image_r1": "text to image R@1",
}

Curves = dict[str, list[list[dict[str, float]]]]


def compare(config: ConfigDict, losses: Sequence[str], seeds: Sequence[int], workdir: str | Path) -> Curves:
    """Train every loss with every seed, record the results and plot them.

    Args:
      config: settings, see `configs/base.py`. `loss` and `seed` are replaced. It must evaluate zero-shot and retrieval.
      losses: losses with further changed settings, such as "clip,batch_size=128".
      seeds: training seeds of each loss.
      workdir: folder of all runs and their results.

    Returns:
      Evaluations of each run, by loss and seed.

    Raises:
      ValueError: a change is not of the form key=value, or no such setting exists.
    """
    folder = Path(workdir)
    curves: Curves = {loss: [] for loss in losses}
    for loss in losses:
        for seed in seeds:
            run_config = _changed(config, loss)
            run_config.seed = seed
            run_folder = folder / f"{loss.replace(',', '-')}-{seed}"
            train(run_config, run_folder)
            curves[loss].append(
                [line for line in read_metrics(run_folder / METRICS_FILE) if METRICS.keys() <= line.keys()]
            )
    final = {loss: [{name: lines[-1][name] for name in METRICS} for lines in runs] for loss, runs in curves.items()}
    (folder / RESULTS_FILE).write_text(json.dumps(final, indent=2) + "\n")
    plot(curves, folder / PICTURE_FILE)
    for loss, runs in final.items():
        say(f"{loss}: " + "  ".join(summary(label, [r[name] for r in runs]) for name, label in METRICS.items()))
    return curves


def _changed(config: ConfigDict, loss: str) -> ConfigDict:
    """Return `config` with a loss and its changed settings, such as "clip,batch_size=128"."""
    changed = config.copy_and_resolve_references()
    changed.loss, _, changes = loss.partition(",")
    try:
        changed.update_from_flattened_dict(parse_overrides(changes, "--compare"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected --compare with settings of the configuration, got {changes!r}: {error}") from error
    return changed


def summary(label: str, values: Sequence[float]) -> str:
    """Format the mean and range of a metric, in percent.

    Args:
      label: name of the metric.
      values: the metric of each seed, as a fraction.
    """
    low, mean, high = (100 * value for value in (min(values), statistics.mean(values), max(values)))
    return f"{label} {mean:.1f} % ({low:.1f} to {high:.1f})"


def plot(curves: Curves, path: Path) -> None:
    """Plot each metric over the steps: every seed thin, their mean bold."""
    figure = Figure(figsize=(5 * len(METRICS), 4))
    for axes, (name, label) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        for color, (loss, runs) in enumerate(curves.items()):
            steps = [line["step"] for line in runs[0]]
            values = [[100 * line[name] for line in lines] for lines in runs]
            for seed_values in values:
                axes.plot(steps, seed_values, color=f"C{color}", linewidth=0.7, alpha=0.6)
            mean = [statistics.mean(step_values) for step_values in zip(*values, strict=True)]
            axes.plot(steps, mean, color=f"C{color}", linewidth=2, label=loss)
        axes.set(xlabel="step", ylabel=f"{label}, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    command.run(
        lambda workdir: compare(command.chosen_config(), _COMPARED.value, [int(seed) for seed in _SEEDS.value], workdir)
    )
