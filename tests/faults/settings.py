"""Give random values to random settings and count the outcomes.

    python -m tests.faults.settings --count=300 [--seed=0] [--runs=10]

A draw changes one or two settings of the tiny run on the digits, as `--config.NAME=VALUE`. Values are inside, at the
edge and outside of the range, of wrong types, huge, not finite, or of a wrong length. Each draw must be refused in
one line, or be accepted and planned; `--runs` of the accepted ones train one step. A value outside of its setting's
type or range must be refused.
"""

import argparse
import collections
import contextlib
import functools
import os
import sys
import tempfile
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np
from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import base
from experiments import command
from infcl_jax import run
from infcl_jax.evaluation.tasks import load_tasks
from infcl_jax.models import TOWERS
from infcl_jax.settings import SETTINGS, Range, Setting, make_config, with_total_steps
from tests.faults.case import choose

MEMORY = 2**34  # bytes of the planned device
TINY = {
    "dataset": "digits",
    "model": "tiny",
    "batch_size": "32",
    "total_steps": "1",
    "optimizer.warmup_steps": "0",
    "eval_every": "0",
    "checkpoint_every": "0",
    "model_overrides": "embed_dim=16,vision.width=16,vision.layers=1,vision.image_size=16,text.width=16,text.layers=1,"
    "text.context_length=36",
}
NO_NUMBERS = ("nan", "inf", "-inf", "1e999", "10" * 200)
WRONG = {
    int: ("1.5", "abc", "(1, 2)", "True", "", "15e-1", "0x", *NO_NUMBERS),
    float: ("abc", "(1, 2)", "True", "", "1,5", *NO_NUMBERS),
    bool: ("maybe", "2", "None", "1.5", "(True,)"),
}
NONSENSE = ("no such thing", "no/such/thing", "\x1b[31m", "-1", "((", "ünïcode", "a" * 5000)
_NOT_RUN = {"compilation_cache", "cache_frozen", "num_workers", "cpu_devices"}  # they write folders or take the machine


class Draw(NamedTuple):
    """Values of settings as text."""

    values: dict[str, str]
    wrong: bool  # whether a value is outside of its setting's type, range or choices

    @property
    def arguments(self) -> list[str]:
        """Command-line form, on top of the tiny run."""
        return [f"--config.{name}={value}" for name, value in (TINY | self.values).items()]


def draw(rng: np.random.Generator) -> Draw:
    """Draw values of one or two settings."""
    names = [choose(list(SETTINGS), rng) for _ in range(1 + (rng.random() < 0.3))]
    drawn = {name: _value(SETTINGS[name], rng) for name in names}
    return Draw({name: text for name, (text, _) in drawn.items()}, any(wrong for _, wrong in drawn.values()))


def _value(setting: Setting, rng: np.random.Generator) -> tuple[str, bool]:
    """Draw the text of a value, and whether it must be refused."""
    kind, inside = setting.base_type, rng.random() < 0.5
    if rng.random() < 0.1:
        return "None", not setting.optional and kind is not str
    if isinstance(setting.default, tuple) or get_origin(setting.base_type):
        return _tuple(setting, inside, rng)
    if kind is str:
        if setting.values is not None and inside:
            return choose(tuple(setting.values), rng), False
        return choose(NONSENSE, rng), setting.values is not None
    if kind is bool:
        return (choose(("True", "False"), rng), False) if inside else (choose(WRONG[bool], rng), True)
    if not inside and rng.random() < 0.4:
        return choose(WRONG[kind], rng), True
    if setting.values is None:
        return repr(kind(rng.uniform(-10, 10))), False
    return _number(kind, setting.values, inside, rng)


def _number(kind: type, allowed: Range, inside: bool, rng: np.random.Generator) -> tuple[str, bool]:
    """Draw a number inside or outside of a range."""
    high = min(allowed.high, 2**40)
    if inside:
        value = choose((allowed.low, high, rng.uniform(allowed.low, min(high, allowed.low + 10))), rng)
    else:
        outside = [allowed.low - 1, allowed.low - 1e-3, allowed.low - 1e20]
        outside += [allowed.high + 1, allowed.high * 1e6 + 1] if np.isfinite(allowed.high) else [10.0**60]
        outside += [1e-60] if allowed.above and kind is float else []
        value = choose([v for v in outside if kind is float or float(v).is_integer()], rng)
    number = int(value) if kind is int else float(value)
    return repr(number), number not in allowed or not inside


def _tuple(setting: Setting, inside: bool, rng: np.random.Generator) -> tuple[str, bool]:
    """Draw a tuple of right or wrong entries and length."""
    kinds = [kind for kind in get_args(setting.base_type) if kind is not Ellipsis]
    if setting.default and kinds[0] is float:
        entries = [_number(float, setting.values, inside, rng) for _ in kinds]
        length = len(kinds) if inside else choose((1, len(kinds), len(kinds) + 1), rng)
        texts = [entries[i % len(entries)][0] for i in range(length)]
        return f"({', '.join(texts)},)", any(wrong for _, wrong in entries) or length != len(kinds)
    if setting.name == "frozen":
        return choose(("()", *(f"('{tower}',)" for tower in TOWERS)), rng) if inside else "('nose',)", not inside
    if inside:
        return "()", False
    return choose(("(1, 2)", "((1,),)", "5", "abc", "('a'", "(('(', 1.0),)"), rng), True


@contextlib.contextmanager
def _silent():
    """Drop what the parsers print."""
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        yield


def parsed(arguments: list[str]) -> ConfigDict:
    """Parse the arguments as the commands do."""
    values, argv = flags.FlagValues(), ["program", *arguments]
    config = config_flags.DEFINE_config_dict("config", base.get_config(), flag_values=values, sys_argv=argv)
    values(argv)
    return config.value


@functools.cache
def _source() -> Any:
    return run.training_source(base_config())


def base_config() -> ConfigDict:
    """Return the settings of the tiny run."""
    return parsed(Draw({}, False).arguments)


def refusal(case: Draw) -> str | None:
    """Parse, check and plan the settings of a draw.

    Returns:
      The line that refuses them, or None.

    Raises:
      Exception: the settings are neither refused nor planned.
    """
    try:
        with _silent():
            config = parsed(case.arguments)
    except (flags.Error, LookupError, AttributeError, TypeError, ValueError, OSError, ImportError) as error:
        return command._message(error)  # as the commands format it
    try:
        config = make_config(config)
        source = _source() if "dataset" not in case.values else run.training_source(config)
        config = with_total_steps(config, source)
        run.text_tokenizer(config)
        workload = run.workload(config, 1, MEMORY, source=source)
        load_tasks(config.evaluations, config.evaluation.data_dir or config.data_dir)
        if workload.batch_size > len(source):
            raise ValueError("a batch exceeds the source")
    except (ValueError, OSError, ImportError) as error:
        return command._message(error)
    return None


def problem(case: Draw) -> tuple[str | None, str]:
    """Return the refusal of a draw, and the broken promise or ""."""
    try:
        line = refusal(case)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error)[:200]}"
    if line is None:
        return None, "accepted" if case.wrong else ""
    return line, "" if "\n" not in line and line.startswith("error: ") else f"more than one line: {line[:300]!r}"


def main() -> None:
    """Check draws, train some of the accepted ones and print the outcomes."""
    from tests import runs  # starts the processes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=10)
    arguments = parser.parse_args()
    outcomes: collections.Counter[str] = collections.Counter()
    accepted = []
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        case = draw(np.random.default_rng(seed))
        line, broken = problem(case)
        outcomes.update({"refused" if line else "accepted": 1, "problems": bool(broken)})
        if broken:
            print(f"seed {seed}, {case.values}: {broken}", flush=True)
        elif line is None and not _NOT_RUN & case.values.keys():
            accepted.append(case)
    for case in accepted[:: max(1, len(accepted) // max(1, arguments.runs))][: arguments.runs]:
        with tempfile.TemporaryDirectory() as folder:
            small = ["--config=configs/base.py", "--config.num_workers=0", f"--workdir={folder}/run"]
            status, _, stderr = runs.command("experiments.train", *small, *case.arguments)
        trained = status == 0 or (status == 1 and stderr.count("\n") == 1)
        outcomes.update({f"trained, exit {status}": 1, "problems": not trained})
        if status:
            print(f"{case.values}: exit {status}: {stderr[-600:]}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in outcomes.items()))
    sys.exit(outcomes["problems"] > 0)


if __name__ == "__main__":
    main()
