"""Evaluate the latest checkpoint of a run, or other weights, on benchmarks.

    python -m experiments.evaluate --workdir=runs/quickstart [--config.evaluation.gallery=100]
    python -m experiments.evaluate --weights=PATH --suite=imagenet_variants --data_dir=benchmarks --output=results

Measures zero-shot accuracy and retrieval. Of a run, it also measures the whole-split loss, and plots the curves and a
retrieval grid. It starts from the settings of the run. The command line can change those that docs/settings.md marks
with "evaluation": data, devices and evaluation. docs/evaluation.md describes benchmarks and suites.
"""

from typing import Any

from absl import flags

from experiments import command
from infcl_jax.evaluation.suites import SUITES
from infcl_jax.run.evaluate import changed_config, evaluate, evaluate_weights
from infcl_jax.settings import SETTINGS, RunConfig, flattened

_OF_WEIGHTS = ("output", "model", "tokenizer", "batch_size", "max_bad_records")  # flags


def _given_changes() -> dict[str, Any]:
    """Return the changes of the command line, by dotted name.

    Includes every override `--config.NAME=VALUE`. Of `--config=FILE` it includes the settings that an evaluation can
    change, and the model, so that another model than the run's is an error.
    """
    file, changes = command.chosen_file_and_changes()
    further = {"evaluations": _chosen_evaluations(), "evaluation.data_dir": flags.FLAGS.data_dir}
    changes |= {name: value for name, value in further.items() if value}
    if file is None:
        return changes
    chosen = flattened(command.chosen_config())
    # Settings that a run chooses at its start, such as precision, stay as it chose them.
    started = {"model", *(k for k, setting in SETTINGS.items() if setting.resolved_once)}
    given = {k: v for k, v in chosen.items() if k not in started or v != SETTINGS[k].default}
    return {k: v for k, v in given.items() if k == "model" or SETTINGS[k].evaluated} | changes


def _resolved_config() -> RunConfig:
    """Return the settings of this evaluation, for `--print_config`."""
    return changed_config(command.given_workdir(), _given_changes())[0]


def _chosen_evaluations() -> tuple[str, ...]:
    values = flags.FLAGS
    return (*filter(None, [values.suite]), *values.evaluations)


def _main() -> None:
    values = flags.FLAGS
    of_weights = {name: values[name].value for name in _OF_WEIGHTS if values[name].value is not None}
    if values.weights:
        if values.workdir:
            raise ValueError("expected --weights or --workdir, got both; the weights of a run are --weights=WORKDIR")
        evaluate_weights(values.weights, _chosen_evaluations(), values.data_dir or "data", **of_weights)
    elif of_weights:
        given = ", ".join(f"--{name}" for name in of_weights)
        raise ValueError(f"expected {given} with --weights only; a run has its own settings")
    else:
        evaluate(command.given_workdir(), _given_changes())


if __name__ == "__main__":
    flags.DEFINE_string("weights", None, "Weights of infcl_jax.load, instead of --workdir.")
    flags.DEFINE_string("model", None, "Name or OpenCLIP configuration of --weights, for a file without one.")
    flags.DEFINE_enum("suite", None, list(SUITES), "Suite of benchmarks in --data_dir.")
    flags.DEFINE_list(
        "evaluations",
        [],
        "Benchmarks in --data_dir (cifar10, cifar10:linear_probe), suites, paths of data, Python files, with commas.",
    )
    flags.DEFINE_string("data_dir", None, "Folder of the benchmarks, such as wds_imagenet1k.")
    flags.DEFINE_string("output", None, "Folder of results.json, .csv and .html with --weights.")
    flags.DEFINE_string("tokenizer", None, "Tokenizer of --weights; default: that of the model.")
    size = SETTINGS["evaluation.batch_size"].default
    meaning = f"Images or texts encoded at a time with --weights; default: {size}."
    flags.DEFINE_integer("batch_size", None, meaning, lower_bound=1)
    meaning = "Largest number of bad records of a split with --weights, as config.max_bad_records."
    flags.DEFINE_float("max_bad_records", None, meaning, lower_bound=0)
    command.run(_main, saved_config=True, config=_resolved_config)
