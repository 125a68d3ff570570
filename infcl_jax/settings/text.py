"""The table of settings as help text and Markdown, and configurations as Python files."""

import textwrap
from typing import Any

from infcl_jax.schema import Setting
from infcl_jax.settings.run_config import SETTINGS, RunConfig

_WIDTH = 120  # characters per line of help
_INDENT = " " * 6  # before a meaning in the help

_MARKDOWN_HEADER = """\
# Settings

Each setting is given as `--config.NAME=VALUE`, or changed in a configuration such as `configs/digits.py`. A resumed run
must keep those marked "fixed". An evaluation can change those marked "evaluation".

This page is generated:

    python -m infcl_jax.settings > docs/settings.md
"""

# First field of each section of `--help` and `docs/settings.md`.
_TITLES = {
    "seed": "Run",
    "dataset": "Data",
    "tokenizer": "Text",
    "model": "Model",
    "init": "Initial parameters",
    "loss": "Loss",
    "global_contrastive": "Global contrastive losses (SogCLR to FastCLIP)",
    "grad_cache": "Gradient caching",
    "text_retrieval": "Dense text retrieval",
    "batch_size": "Training",
    "optimizer": "Optimizer",
    "eval_every": "Evaluation",
    "log_every": "Logs and checkpoints",
}


def _sections() -> dict[str, list[Setting]]:
    """Group the settings by the title of their section."""
    sections, title = dict[str, list[Setting]](), ""
    for name, declared in SETTINGS.items():
        title = _TITLES.get(name.partition(".")[0], title)
        sections.setdefault(title, []).append(declared)
    return sections


def format_entry(flag: str, default: Any, meaning: str) -> list[str]:
    """Format a flag with its default as lines of help."""
    lines = textwrap.wrap(meaning, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
    return [f"  {flag}={default!r}", *lines]


def format_help() -> str:
    """Format the table for a terminal: names with defaults, then meanings and allowed values."""
    lines = []
    for title, section in _sections().items():
        lines += ["", f"{title}:"]
        for setting in section:
            meaning = f"{setting.meaning} [{setting.allowed}]"
            lines += format_entry(f"--config.{setting.name}", setting.default, meaning)
    return "\n".join(["Settings, with their defaults:", *lines])


def format_markdown() -> str:
    """Format the table as the Markdown page `docs/settings.md`."""
    lines = [_MARKDOWN_HEADER]
    for title, section in _sections().items():
        lines += [f"## {title}", "", "| setting | default | values | meaning |", "| --- | --- | --- | --- |"]
        for setting in section:
            notes = [note for note, marked in (("fixed", setting.fixed), ("evaluation", setting.evaluated)) if marked]
            meaning = setting.meaning + (f" [{', '.join(notes)}]" if notes else "")
            cells = f"`{setting.name}`", f"`{setting.default!r}`", setting.allowed, meaning
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def format_python(config: RunConfig) -> str:
    """Format a configuration as a Python file with `get_config()`.

    A comment marks each value that differs from the default.
    """
    lines = [
        '"""Settings of a run."""',
        "",
        "from configs import base",
        "",
        "",
        "def get_config():",
        '    """Return the settings."""',
        "    config = base.get_config()",
    ]
    for title, section in _sections().items():
        lines += ["", f"    # {title}"]
        for setting in section:
            value = config[setting.name]
            changed = "" if value == setting.default else f"  # default: {setting.default!r}"
            lines.append(f"    config.{setting.name} = {value!r}{changed}")
    return "\n".join([*lines, "", "    return config"])
