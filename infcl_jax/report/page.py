"""HTML page of one or several runs."""

import json
import math
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from infcl_jax.evaluation.html_page import (
    Best,
    add,
    add_examples,
    add_table,
    data_uri,
    format_metric,
    new_page,
    words,
    write_html,
)
from infcl_jax.report import charts, curves
from infcl_jax.report.workdirs import RunRecord, format_seconds, read_runs
from infcl_jax.runtime.environment import utc_date
from infcl_jax.runtime.outputs import print_line
from infcl_jax.settings import SETTINGS
from infcl_jax.training.metrics import DATA_WAIT_SHOWN

_SECONDS = 10.0  # between two pages of `report_runs`
_MISSING = "-"
_MIB = 1 << 20
_EVALUATION = ("evaluation.retrieval", "evaluation.zero_shot", "evaluation.gallery")  # settings that determine results
_STYLE = """
body { max-width: 80rem; }
.warnings { border-left: .25rem solid var(--bad); padding-left: 1.6rem; }
.warnings li, .messages li { overflow-wrap: anywhere; }
:is(.summary, .evaluations, .memory) :is(td, thead th) { text-align: right; }
.memory thead th:first-child, .evaluations thead th:first-child { text-align: left; }
:is(.differences, .settings) :is(td, tbody th) { max-width: 24rem; min-width: 7rem; overflow-wrap: anywhere; }
:is(.differences, .settings) td { text-align: left; white-space: normal; }
:is(.differences, .settings) tbody th { min-width: 12rem; }
.note { opacity: .75; }
.messages { font-size: .9rem; }
img.retrieval { background: white; border-radius: .4rem; margin: 0; }
img.retrieval { min-width: 44rem; }  /* for readable captions: on a phone, its box scrolls */
"""
_GRID_LEGEND = (
    "Each row has a caption of the evaluation split, the rank of its own image, and the images whose features are most "
    "similar to it, the most similar first. A green frame marks the caption's own image: in the first column it is "
    "retrieved at rank 1. A row without a frame has it further behind."
)


def write_report(path: str | Path, runs: Sequence[RunRecord], *, reload_seconds: float | None = None) -> None:
    """Write a self-contained HTML page of runs; an existing file is replaced at once.

    The page has curves, throughput, memory against the plan, evaluations, retrieved images, mistakes, settings and
    environments, each if the runs have them. A run has the same color in all charts, which share their x axis.

    Args:
      path: output file; its folder is created if missing.
      runs: runs of `read_runs`.
      reload_seconds: time after which the browser loads the page again; None: never.

    Examples:
      >>> write_report("report.html", read_runs(["runs/digits"]))
    """
    title = f"Report of {', '.join(run.name for run in runs)}" if len(runs) < 4 else f"Report of {len(runs)} runs"
    style = _STYLE + charts.STYLE + curves.STYLE
    # A refresh by a meta element would drop the fragment, which holds the chosen axis.
    reload = f"setTimeout(() => location.reload(), {1000 * reload_seconds:.0f});\n" if reload_seconds else ""
    script = charts.SCRIPT + curves.SCRIPT + reload
    root, body = new_page(title, style=style, script=script)
    reloaded = f", loaded again every {reload_seconds:g} s" if reload_seconds else ""
    add(body, "p", f"Written {utc_date()}{reloaded}", {"class": "note"})
    differences = _differences(runs)
    _add_summary(body, runs)
    curves.add_curves(body, runs)
    _add_memory(body, runs)
    _add_evaluations(body, runs, [name for name in differences if name.startswith(_EVALUATION)])
    _add_retrieval(body, runs)
    _add_mistakes(body, runs)
    _add_settings(body, runs, differences)
    _add_environment(body, runs)
    _add_messages(body, runs)
    add(body, "script", script)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_html(path, root)


def report_runs(workdirs: Sequence[str], output: str, *, watch: bool = False, seconds: float = _SECONDS) -> None:
    """Write the page of the runs in work directories, and follow unfinished runs.

    Examples:
      >>> infcl_jax.report.report_runs(["runs/digits"], "report.html")
      report: report.html

    Args:
      workdirs: directories of the runs. Files among them, as of the pattern `runs/*`, are skipped with a line.
      output: HTML file.
      watch: whether to write the page again until all runs have finished, or until Ctrl-C.
      seconds: time between two pages.

    Raises:
      FileNotFoundError: a work directory does not exist.
      ValueError: no work directory is given.
    """
    if files := [path for path in workdirs if Path(path).is_file()]:
        print_line(f"skipped, not folders of runs: {', '.join(files)}")
        workdirs = [path for path in workdirs if path not in files] or files  # a file alone is an error
    runs = read_runs(workdirs)
    try:
        while watch and not all(run.finished for run in runs):
            write_report(output, runs, reload_seconds=seconds)
            time.sleep(seconds)
            runs = read_runs(workdirs)
    except KeyboardInterrupt:
        pass  # the last page does not reload
    write_report(output, runs)
    print_line(f"report: {output}")


def _add_summary(body: Element, runs: Sequence[RunRecord]) -> None:
    """Add the table of state, progress and speed, and what to look at."""
    header = ("", "State", "Step", "Training loss", *(m.title for m in curves.SPEED.values()), "Time")
    rows = list(zip(header, *map(_summary, runs), strict=True))
    shown = [row for row in rows[1:] if set(row[1:]) != {_MISSING}]
    add_table(body, rows[0], shown, "summary")
    add(body, "p", "Throughput and MFU are medians, the wait is a mean, the memory a maximum.", {"class": "note"})
    warnings = [(run.name, warning) for run in runs for warning in (*run.warnings, *_advice(run))]
    if warnings:
        block = SubElement(body, "ul", {"class": "warnings"})
        for name, warning in warnings:
            add(block, "li", f"{name}: {warning}" if len(runs) > 1 else warning)


def _summary(run: RunRecord) -> tuple[str, ...]:
    """Return the column of a run in the summary."""
    last_step = f" of {run.total_steps:,}" if run.total_steps else ""
    step = _MISSING if run.last is None else f"{run.last.step:,}{last_step}"
    losses = run.values("loss")
    reduce: dict[str, Any] = {"data/wait_fraction": statistics.fmean, "memory/peak_bytes": max}
    speeds = []
    for name, metric in curves.SPEED.items():
        values = run.values(name)
        value = metric.scale * reduce.get(name, statistics.median)(values) if values else None
        speeds.append(_MISSING if value is None else charts.format_value(value))
    first, last = run.times
    duration = format_seconds(last - first) if math.isfinite(last) else _MISSING
    return run.name, run.state(), step, f"{losses[-1]:.4f}" if losses else _MISSING, *speeds, duration


def _advice(run: RunRecord) -> list[str]:
    """Name waits for data, unused memory and resumptions."""
    advice = []
    waits = run.values("data/wait_fraction")
    if waits and (share := statistics.fmean(waits)) >= DATA_WAIT_SHOWN:
        said = any("waiting for data" in message for message in run.messages)
        where = "the advice of run.log below" if said else "docs/data.md#is-the-data-fast-enough"
        advice.append(f"waits for data {100 * share:.0f} % of the time, see {where}")
    peaks, limit = run.values("memory/peak_bytes"), run.plan.get("limit")
    if peaks and limit and max(peaks) < 0.6 * limit:
        share = max(peaks) / limit
        advice.append(f"uses {100 * share:.0f} % of the memory limit; experiments.plan prints the largest batch")
    if resumed := [str(start["step"]) for start in run.starts if start.get("step")]:
        advice.append(f"resumed from step {', '.join(resumed[-8:])}")
    return advice


def _add_memory(body: Element, runs: Sequence[RunRecord]) -> None:
    plans = [run.plan for run in runs]
    if not any(plans):
        return
    add(body, "h2", "Memory of a device against its plan")
    names = dict.fromkeys(name for plan in plans for name in plan.get("components", {}))
    rows = [(name, *(_mib(plan.get("components", {}).get(name)) for plan in plans)) for name in names]
    measured = [max(run.values("memory/peak_bytes"), default=None) for run in runs]
    planned = [plan.get("peak") for plan in plans]
    pairs = zip(measured, planned, strict=True)
    rows += [
        ("planned peak", *map(_mib, planned)),
        ("measured peak", *map(_mib, measured)),
        ("measured / planned", *(f"{peak / plan:.2f}" if peak and plan else _MISSING for peak, plan in pairs)),
        ("limit", *(_mib(plan.get("limit")) for plan in plans)),
    ]
    add_table(body, ("MiB", *(run.name for run in runs)), rows, "memory")
    note = "The planned peak is at most the sum, since not all components are live at the same time."
    if not any(measured):
        note += " These devices do not report their memory, so there is no measured peak."
    add(body, "p", note, {"class": "note"})


def _add_evaluations(body: Element, runs: Sequence[RunRecord], different: Collection[str]) -> None:
    """Add a table of the latest evaluations with marked best values, and the settings that differ between them."""
    names = dict.fromkeys(name for run in runs for name in run.results)
    if not names:
        return
    add(body, "h2", "Evaluations")
    rows = [("step", *(_MISSING if run.results_step is None else f"{run.results_step:,}" for run in runs))]
    one_size = len({run.batch_size for run in runs}) == 1
    for name in names:
        comparable = one_size or not name.endswith("batch_loss")  # which grows with the batch size
        rows.append((words(name), *_cells(name, [run.results.get(name) for run in runs], comparable)))
    add_table(body, ("Metric", *(run.name for run in runs)), rows, "evaluations")
    note = "The latest evaluation of each run."
    if len(runs) > 1:
        note += " The best value of a row is green and bold."
    if different:
        note += f" Values may not compare, since these settings of the evaluations differ: {', '.join(different)}."
    add(body, "p", note, {"class": "note"})


def _add_retrieval(body: Element, runs: Sequence[RunRecord]) -> None:
    """Add the images that captions retrieve, with a legend."""
    shown = [run for run in runs if run.grid is not None]
    if not shown:
        return
    add(body, "h2", "Retrieved images")
    add(body, "p", _GRID_LEGEND)
    for run in shown:
        add(body, "h3", run.name)
        box = SubElement(body, "div", {"class": "scroll"})
        source = data_uri(run.grid, "image/png")
        SubElement(box, "img", {"class": "retrieval", "src": source, "alt": f"retrieved images of {run.name}"})


def _add_mistakes(body: Element, runs: Sequence[RunRecord]) -> None:
    """Add the most confused classes and examples of mistakes."""
    tasks = [(run, name, task) for run in runs for name, task in run.examples.items()]
    if not tasks:
        return
    add(body, "h2", "Mistakes")
    for run, name, task in tasks:
        add(body, "h3", f"{run.name}: {words(name)}")
        if confusions := task["confusions"]:
            add(body, "p", "Most confused classes")
            rows = [(c["expected"], c["predicted"], f"{c['images']:,}") for c in confusions]
            add_table(body, ("True", "Predicted", "Images"), rows, "confusions")
        if wrong := [example for example in task["examples"] if not example["correct"]]:
            block = SubElement(body, "details")
            add(block, "summary", f"Mistakes: {len(wrong)} of {len(task['examples'])} examples")
            add_examples(block, wrong)
        else:
            add(body, "p", "No mistakes among the examples.")


def _cells(name: str, values: Sequence[float | None], comparable: bool) -> list[str]:
    """Format the values of a metric and mark the best of comparable ones, the lowest of losses."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    best = (min if name.endswith("loss") else max)(finite) if comparable and len(finite) > 1 else None
    cells = []
    for value in values:
        text = _MISSING if value is None else format_metric(name, value)
        cells.append(Best(text) if value is not None and value == best else text)
    return cells


def _differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the settings that differ between runs with a configuration, by name."""
    configs = [run.config for run in runs if run.config]
    values = {name: [config.get(name) for config in configs] for name in SETTINGS}
    return {name: v for name, v in values.items() if any(value != v[0] for value in v)}


def _add_settings(body: Element, runs: Sequence[RunRecord], differences: dict[str, list[Any]]) -> None:
    shown = [run for run in runs if run.config]
    if not shown:
        return
    header = [run.name for run in shown]
    if len(shown) > 1:
        add(body, "h2", "Settings that differ")
        columns = ["Setting", *header]
        rows = [(name, *map(_setting, values)) for name, values in differences.items()]
    else:
        add(body, "h2", "Settings that differ from the defaults")
        columns = ["Setting", *header, "default"]
        config = shown[0].config
        defaults = {n: json.loads(json.dumps(setting.default)) for n, setting in SETTINGS.items() if n in config}
        rows = [(n, _setting(config[n]), _setting(value)) for n, value in defaults.items() if config[n] != value]
    if rows:
        add_table(body, columns, rows, "differences")
    else:
        add(body, "p", "None.")
    block = SubElement(body, "details")
    add(block, "summary", "All settings")
    names = dict.fromkeys(name for run in shown for name in run.config)
    everything = [(name, *(_setting(run.config.get(name, _MISSING)) for run in shown)) for name in names]
    add_table(block, ("Setting", *header), everything, "settings")


def _add_environment(body: Element, runs: Sequence[RunRecord]) -> None:
    shown = [run for run in runs if run.starts]
    if not shown:
        return
    add(body, "h2", "Environment")
    latest = [run.starts[-1] for run in shown]
    names = [name for name in dict.fromkeys(name for start in latest for name in start) if name != "memory_plan"]
    rows = [(name, *(str(start.get(name, _MISSING)) for start in latest)) for name in names]
    rows.append(("starts", *(str(len(run.starts)) for run in shown)))
    add_table(body, ("Latest start", *(run.name for run in shown)), rows, "environment")


def _add_messages(body: Element, runs: Sequence[RunRecord]) -> None:
    shown = [run for run in runs if run.messages]
    if not shown:
        return
    add(body, "h2", "Latest warnings and advice of run.log")
    for run in shown:
        if len(runs) > 1:
            add(body, "h3", run.name)
        block = SubElement(body, "ul", {"class": "messages"})
        for message in run.messages:
            add(block, "li", message)


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _mib(size: float | None) -> str:
    return _MISSING if size is None else f"{size / _MIB:,.1f}"
