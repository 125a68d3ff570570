"""Evaluation of dual encoders: benchmarks, zero-shot classification, retrieval, split loss and plots."""

from infcl_jax.evaluation.benchmark_source import load_benchmark
from infcl_jax.evaluation.class_data import ClassData, class_data, class_data_names, read_class_names, read_templates
from infcl_jax.evaluation.contrastive import batch_loss, split_loss
from infcl_jax.evaluation.few_shot import FewShot, few_shot
from infcl_jax.evaluation.linear_probe import LinearProbe, adamw_probe, linear_probe
from infcl_jax.evaluation.plots import plot_curves, plot_retrieval_grid
from infcl_jax.evaluation.results import ExamplePrediction, TaskResult, flat_metrics
from infcl_jax.evaluation.retrieval import retrieval_map, retrieval_recall, zero_shot_accuracy
from infcl_jax.evaluation.suite import EvaluationConfig, Suite
from infcl_jax.evaluation.tasks import Task
from infcl_jax.evaluation.text_retrieval import TextRetrievalSuite
from infcl_jax.evaluation.writers import (
    append_csv,
    describe_environment,
    format_line,
    format_table,
    write_json,
    write_page,
    write_results,
)
from infcl_jax.inference.feature_files import FeatureRows, read_features
from infcl_jax.inference.features import Features, encode_split
from infcl_jax.inference.prompts import class_embeddings
from infcl_jax.inference.search import top_k

__all__ = [
    "ClassData",
    "EvaluationConfig",
    "ExamplePrediction",
    "FeatureRows",
    "Features",
    "FewShot",
    "LinearProbe",
    "Suite",
    "Task",
    "TaskResult",
    "TextRetrievalSuite",
    "adamw_probe",
    "append_csv",
    "batch_loss",
    "class_data",
    "class_data_names",
    "class_embeddings",
    "describe_environment",
    "encode_split",
    "few_shot",
    "flat_metrics",
    "format_line",
    "format_table",
    "linear_probe",
    "load_benchmark",
    "plot_curves",
    "plot_retrieval_grid",
    "read_class_names",
    "read_features",
    "read_templates",
    "retrieval_map",
    "retrieval_recall",
    "split_loss",
    "top_k",
    "write_json",
    "write_page",
    "write_results",
    "zero_shot_accuracy",
]
