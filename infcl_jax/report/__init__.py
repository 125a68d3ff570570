"""HTML reports of one or several runs."""

from infcl_jax.report.page import report_runs as report_runs
from infcl_jax.report.page import write_report as write_report
from infcl_jax.report.workdirs import RunRecord as RunRecord
from infcl_jax.report.workdirs import read_run as read_run
from infcl_jax.report.workdirs import read_runs as read_runs
