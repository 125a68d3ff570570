"""Results of an evaluation as text: a table, or one line."""

import re
from collections.abc import Mapping

# Names of metrics at k, such as "retrieval/image_to_text_r5" and "zero_shot/top1".
_TOP_K = re.compile(r"(?P<task>.+)[/_](?P<kind>r|top)(?P<k>\d+)")
_KINDS = {"r": "R@k", "top": "top-k accuracy"}


def format_table(results: Mapping[str, float]) -> str:
    """Format results as a table of tasks (rows) by k (columns).

    Losses follow in rows of their own.

    Args:
      results: metrics of `infcl_jax.evaluation.Suite`.

    Returns:
      Lines without a final newline. Recalls and accuracies are percentages of the examples, losses are in nats.
    """
    rows: dict[str, dict[str, str]] = {}
    others = {}
    for name, value in results.items():
        if match := _TOP_K.fullmatch(name):
            label = f"{_words(match['task'])} ({_KINDS[match['kind']]})"
            rows.setdefault(label, {})[f"k = {match['k']}"] = f"{100 * value:.1f} %"
        else:
            others[f"{_words(name)} (nats)" if name.endswith("loss") else _words(name)] = f"{value:.4f}"
    # column[4:] is the number after "k = ".
    columns = sorted({column for row in rows.values() for column in row}, key=lambda column: int(column[4:]))
    width = max(map(len, (*rows, *others)), default=0)
    lines = [_line(label, [row.get(column, "") for column in columns], width) for label, row in rows.items()]
    header = [_line("", columns, width)] if columns else []
    return "\n".join(header + lines + [_line(label, [value], width) for label, value in others.items()])


def format_line(results: Mapping[str, float]) -> str:
    """Format losses and results at k = 1 as one line."""
    entries = []
    for name, value in results.items():
        match = _TOP_K.fullmatch(name)
        if match is None:
            entries.append(f"{name} {value:.4f}")
        elif match["k"] == "1":
            entries.append(f"{name} {100 * value:.1f} %")
    return "  ".join(entries)


def _words(name: str) -> str:
    """Turn "retrieval/image_to_text" into "retrieval image to text"."""
    return name.replace("zero_shot", "zero-shot").replace("/", " ").replace("_", " ")


def _line(label: str, cells: list[str], width: int) -> str:
    return "  ".join([label.ljust(width), *(cell.rjust(7) for cell in cells)]).rstrip()
