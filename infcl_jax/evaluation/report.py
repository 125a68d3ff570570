"""Results of an evaluation as text: a table, or one line."""

import re
from collections.abc import Mapping

from infcl_jax.evaluation.html_page import words
from infcl_jax.runtime.printable import printable

# Names of metrics at k, such as "retrieval/image_to_text_r5" and "zero_shot/top1".
_TOP_K = re.compile(r"(?P<task>.+)[/_](?P<kind>r|top)(?P<k>\d+)")
_IN_LINE = re.compile(r"loss$|/(mean_average_precision|average\w*|\d+_shot)$")
_KINDS = {"r": "R@k", "top": "top-k accuracy"}


def format_table(results: Mapping[str, float]) -> str:
    """Format results as a table of tasks (rows) by k (columns).

    Other metrics follow in rows of their own.

    Examples:
      >>> print(format_table({"validation/loss": 2.1, "zero_shot/top1": 0.631, "zero_shot/top5": 0.87}))
                                    k = 1    k = 5
      zero-shot (top-k accuracy)   63.1 %   87.0 %
      validation loss (nats)       2.1000

    Args:
      results: metrics of `infcl_jax.evaluation.Suite`.

    Returns:
      Lines without a final newline. Losses are in nats, all other metrics are percentages.
    """
    rows: dict[str, dict[str, str]] = {}
    others = {}
    for name, value in results.items():
        if match := _TOP_K.fullmatch(name):
            label = f"{_words(match['task'])} ({_KINDS[match['kind']]})"
            rows.setdefault(label, {})[f"k = {match['k']}"] = f"{100 * value:.1f} %"
        else:
            others[f"{_words(name)} (nats)" if name.endswith("loss") else _words(name)] = _format(name, value)
    # column[4:] is the number after "k = ".
    columns = sorted({column for row in rows.values() for column in row}, key=lambda column: int(column[4:]))
    width = max(map(len, (*rows, *others)), default=0)
    lines = [_line(label, [row.get(column, "") for column in columns], width) for label, row in rows.items()]
    header = [_line("", columns, width)] if columns else []
    return "\n".join(header + lines + [_line(label, [value], width) for label, value in others.items()])


def format_line(results: Mapping[str, float]) -> str:
    """Format the losses and main results as one line.

    Examples:
      >>> format_line({"validation/loss": 2.1, "zero_shot/top1": 0.631, "zero_shot/top5": 0.87})
      'validation/loss 2.1000  zero_shot/top1 63.1 %'
    """
    entries = []
    for name, value in results.items():
        match = _TOP_K.fullmatch(name)
        if match["k"] == "1" if match else _IN_LINE.search(name):
            entries.append(f"{name} {_format(name, value)}")
    return "  ".join(entries)


def _format(name: str, value: float) -> str:
    """Format a loss in nats or a fraction as a percentage."""
    return f"{value:.4f}" if name.endswith("loss") else f"{100 * value:.1f} %"


def _words(name: str) -> str:
    """Turn "retrieval/image_to_text" into "retrieval image to text", in one line."""
    return printable(words(name)).replace("/", " ")


def _line(label: str, cells: list[str], width: int) -> str:
    return "  ".join([label.ljust(width), *(cell.rjust(7) for cell in cells)]).rstrip()
