"""Write a self-contained HTML page of one or several runs.

    python -m experiments.report runs/a [runs/b ...] --output=report.html [--watch]

The page compares curves, speed, memory, evaluations, retrieved images, mistakes, settings and environments. With
--watch it follows unfinished runs: the page is written again every ten seconds, and the browser reloads it. The command
uses no devices, so it can run beside the training.
"""

from absl import flags

from experiments import command_line
from infcl_jax.report import report_runs

_OUTPUT = command_line.shared_flag("output")
_WATCH = flags.DEFINE_bool("watch", False, "Write the page again every ten seconds until all runs have finished.")


def main(workdirs: list[str]) -> None:
    """Write the page of the work directories and flags."""
    report_runs(workdirs, _OUTPUT.value or "report.html", watch=_WATCH.value)


if __name__ == "__main__":
    command_line.run(main, paths=True)
