"""HTML reports of one or several runs."""

from infcl_jax.report.page import report_runs, write_report
from infcl_jax.report.workdirs import RunRecord, read_run, read_runs

__all__ = ["RunRecord", "read_run", "read_runs", "report_runs", "write_report"]
