"""The documentation page of the targets: plans, tables and pictures."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.reproduction.cells import read_cells
from experiments.reproduction.output import PICTURE_FILE, TABLE_FILE, write_output
from experiments.reproduction.plan import GPU, PAPER_GPUS, plan_table
from experiments.reproduction.target import Target

FIGURES = "figures/reproduction"

_HEAD = """# Reproduction

Each table and figure of the four papers that this project implements is a target of one command:

    python -m experiments.reproduce --list
    python -m experiments.reproduce --target=inf-cl-table-1 --scale=tiny
    python -m experiments.reproduce --target=all --scale=tiny       # as `make reproduce-tiny`

A target is a list of cells: settings of a training run, or a measurement. Each finished cell is a file, so the same
command continues after an interruption, and targets share equal cells. A failed cell is recorded, and the others go on.

| scale | runs on | what it measures |
| --- | --- | --- |
| `tiny` | two CPU cores, minutes for each target | tiny towers on digits; memory plans at the paper's sizes |
| `small` | one GPU of 80 GB, minutes for each target | real models on random data, small ones on shapes |
| `paper` | the paper's setting | prints memory and time of each cell, and starts with `--yes` |

Both `small` and `paper` print a [plan](#what-do-small-and-paper-take) of their cells first. The tables of the targets
below are those of `tiny`, and of `small` where it has run, by `python -m experiments.reproduce --page=docs`. A cell is
the measured figure and the paper's. The two are comparable where the sizes are equal, such as memory; accuracies on
digits show a trend, not the paper's level. "Not legible in the source" marks figures that the text copy of a paper
lost. All targets of `tiny` together took 16 minutes on two cores, 2026-11-25.
"""
_PLANS = f"""
## What do `small` and `paper` take?

The planner's estimates for {GPU} GPUs. The first lines of both scales are the plan of a target, a row for each cell:

    python -m experiments.reproduce --target=inf-cl-table-3 --scale=paper [--gpu={GPU} --gpus={PAPER_GPUS}]

| column | meaning |
| --- | --- |
| cells, training runs | measurements of the target; targets share equal cells, which run once |
| steps, time of the steps | of all training runs, without reading files, compilation and evaluation |
| GPUs | of the cells; "none" are figures of the planner |
| GiB per GPU | of the largest cell that fits |
| do not fit | cells that run out of memory: strategies that a paper compares, or a batch of more GPUs |

### Plan of `small`

Most runs at `small` have models whose kernels take less time than their launches and data. The column "small,
estimated" above includes these.

"""
_SCALES = ("tiny", "small")  # of the page's tables
_COMMAND = re.compile(r"--target=(\S+) --scale=(\S+)")


def write_page(targets: Sequence[Target], folder: str | Path, docs: str | Path) -> Path:
    """Write `reproduction.md` and its pictures from the cells of the scales "tiny" and "small".

    A target without finished cells keeps its section of the page, which another machine may have measured.
    """
    docs = Path(docs)
    page = docs / "reproduction.md"
    kept = _sections(page.read_text()) if page.is_file() else {}
    sections, missing = [], []
    for target in targets:
        at_scales = [
            _measured(target, scale, Path(folder, scale), docs) or kept.get((target.name, scale)) for scale in _SCALES
        ]
        sections += [section for section in at_scales if section is not None]
        if at_scales[0] is None:
            missing.append(target)
    if not sections:
        raise ValueError(f"expected finished targets of the scale tiny in {folder}, got none; run them first")
    rest = ""
    if missing:
        names = "\n".join(f"- `{target.name}`: {target.title}" for target in missing)
        rest = f"\n## Not measured yet\n\nThese targets have no finished table at `tiny`:\n\n{names}\n"
    page.write_text("\n".join([_HEAD, overview(targets) + plans(targets), *sections]) + rest)
    return page


def _measured(target: Target, scale: str, folder: Path, docs: Path) -> str | None:
    """Write the picture of a target and return its section; None while cells are missing."""
    cells = target.cells(scale)
    records = read_cells(cells, folder)
    if len(records) < len(cells):
        return None
    table = write_output(target, scale, records, folder / target.name)
    picture = f"{target.name}.png" if scale == "tiny" else f"{target.name}-{scale}.png"
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / target.name / PICTURE_FILE, docs / FIGURES / picture)
    return _section(target, scale, records, (table.parent / TABLE_FILE).read_text(), picture)


def _sections(text: str) -> dict[tuple[str, str], str]:
    """Split a page into the sections of its targets, by name and scale."""
    _, *sections = re.split(r"^(?=###? )", text, flags=re.MULTILINE)
    named = [(match, section) for section in sections if (match := _COMMAND.search(section))]
    return {(match[1], match[2]): section.rstrip("\n") + "\n" for match, section in named}


def plans(targets: Sequence[Target]) -> str:
    """Format the plans of the scales "small" and "paper" as tables.

    A row is a target. The scale "paper" has a table for each paper, below the hardware of its experiments.
    """
    text = f"{_PLANS}{plan_table(targets, 'small')}\n### Plan of `paper`\n"
    for paper in dict.fromkeys(target.paper for target in targets):
        table = plan_table([target for target in targets if target.paper == paper], "paper")
        gpus = f"here {PAPER_GPUS} {GPU}, or as many as a cell states"
        text += f"\n{paper.name}: the paper used {paper.hardware}; {gpus}.\n\n{table}"
    return text


def overview(targets: Sequence[Target]) -> str:
    """Format the list of targets as a table in Markdown."""
    lines = ["| target | paper | shows | tiny, estimated | small, estimated |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{t.name}` | {t.paper.name} | {t.title} | {' | '.join(t.costs)} |" for t in targets]
    return "\n".join(lines) + "\n"


def _section(target: Target, scale: str, records: dict[str, dict[str, Any]], table: str, picture: str) -> str:
    """Format the section of a target at a scale; that of "small" follows that of "tiny"."""
    failed = {record["error"] for record in records.values() if record["status"] == "failed"}
    seconds = sum(record["seconds"] for record in records.values())
    dates = sorted(record["date"][:10] for record in records.values())
    machine = next(iter(records.values()))
    where = f"{machine['cores']} CPU cores, JAX {machine['jax']}, {dates[-1]}, {len(records)} cells, {seconds:.0f} s."
    if scale == "tiny":
        shows = f"{target.shows}\n\nThe paper used: {target.paper.hardware}. Here: {where}"
        lines = [f"## {target.paper.name}, {target.title}", "", shows]
    else:
        title, _, _ = target.title.partition(":")
        lines = [f"### {target.paper.name}, {title} at `{scale}`", "", f"One {machine['device']}, {where}"]
    lines += [
        "",
        f"    python -m experiments.reproduce --target={target.name} --scale={scale}",
        "",
        table,
        f"![{target.title}]({FIGURES}/{picture})",
        "",
    ]
    lines += [f"Failed: {error}" for error in sorted(failed)]
    return "\n".join(lines)
