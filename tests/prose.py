"""Limits of the prose that `make lint` checks: size of the guides, hard words, commit subjects.

python tests/prose.py
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "settings.md")  # the rest is generated
PAGES = [*GUIDES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MODULES = sorted((ROOT / "infcl_jax").rglob("*.py"))

POINTERS = re.compile(r"\b(?:those|that) of\b")
CLAUSES = re.compile(r"(What|Of|As of|See|The same|Likewise|That|Those|Which|Whether|How many|How much|Where)\b")
WORDS_A_MINUTE = 220  # of technical prose
SUBJECT, COMMITS = 72, 20  # characters of a subject; newest commits that are checked


def lines(paths: list[Path], pattern: re.Pattern) -> int:
    """Count the lines that match."""
    return sum(bool(pattern.search(line)) for path in paths for line in path.read_text().splitlines())


def first_lines() -> list[str]:
    """Return the first line of each docstring of the library."""
    nodes = (node for path in MODULES for node in ast.walk(ast.parse(path.read_text())))
    documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return [text.splitlines()[0] for node in documented if (text := ast.get_docstring(node))]


def long_subjects() -> list[str]:
    """Return the subjects of the newest commits that are too long; none outside of a repository."""
    log = subprocess.run(["git", "log", "--format=%s", f"-{COMMITS}"], cwd=ROOT, capture_output=True, text=True)
    return [subject for subject in log.stdout.splitlines() if len(subject) > SUBJECT]


def main() -> int:
    """Print each figure with its limit; return 1 if one exceeds it."""
    words = {page.name: len(page.read_text().split()) for page in GUIDES}
    longest = max(words, key=words.get)
    summaries = first_lines()
    figures = {
        "kB of the guides": (sum(page.stat().st_size for page in GUIDES) / 1000, 150),
        f"minutes to read the longest guide, {longest}": (words[longest] / WORDS_A_MINUTE, 10),
        "lines with 'those of' or 'that of' in the library": (lines(MODULES, POINTERS), 30),
        "lines with 'those of' or 'that of' in the pages": (lines(PAGES, POINTERS), 15),
        "docstrings that open with a clause": (sum(bool(CLAUSES.match(line)) for line in summaries), 5),
        "docstrings with a first line over 14 words": (sum(len(line.split()) > 14 for line in summaries), 415),
        f"subjects over {SUBJECT} characters in {COMMITS} commits": (len(long_subjects()), 0),
    }
    for name, (value, limit) in figures.items():
        print(f"{'ok' if value <= limit else 'TOO MANY':>8}  {value:6.1f} of at most {limit:4}  {name}")
    return int(any(value > limit for value, limit in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
