"""Write a self-contained HTML page of one or several runs.

    python -m experiments.report runs/a [runs/b ...] --output=report.html [--watch]

The page compares curves, speed, memory, evaluations, retrieved images, mistakes, settings and environments. With
--watch it follows unfinished runs: the page is written again every ten seconds, and the browser reloads it. The command
uses no devices, so it can run beside the training.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import command_line
from infcl_jax.report import read_runs, write_report
from infcl_jax.runtime.outputs import print_line

_OUTPUT = command_line.shared_flag("output")
_WATCH = flags.DEFINE_bool("watch", False, "Write the page again every ten seconds until all runs have finished.")

_SECONDS = 10.0  # between two pages of --watch


def report(workdirs: Sequence[str], output: str, *, watch: bool = False, seconds: float = _SECONDS) -> None:
    """Write the page of runs.

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


def main(workdirs: list[str]) -> None:
    """Write the page of the work directories and flags."""
    report(workdirs, _OUTPUT.value or "report.html", watch=_WATCH.value)


if __name__ == "__main__":
    command_line.run(main, paths=True)
