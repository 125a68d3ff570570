"""Curves and the table of results of a run."""

from collections.abc import Mapping
from pathlib import Path

from infcl_jax.evaluation import Suite, TextRetrievalSuite, format_table, plot_curves
from infcl_jax.runtime.console import say
from infcl_jax.runtime.processes import is_lead
from infcl_jax.training import METRICS_FILE

CURVES_FILE = "curves.png"


def save_curves(workdir: Path, suite: Suite | TextRetrievalSuite) -> None:
    """Plot loss and accuracy over the steps, from the run's metrics."""
    if is_lead():
        plot_curves(workdir / METRICS_FILE, workdir / CURVES_FILE, chance=suite.chance)


def say_results(step: int, results: Mapping[str, float]) -> None:
    """Print the table of results, on the leading process only."""
    nothing = (
        "nothing to evaluate on; evaluation.retrieval_dataset and evaluation.zero_shot_dataset name data, for text "
        "retrieval text_retrieval.corpus"
    )
    say(*[f"step {step}:", *format_table(results).split("\n")] if results else [f"step {step}: {nothing}"])
