"""Precision of the towers, and its record in a run."""

import contextlib
import json

import jax
import pytest

from infcl_jax import run
from infcl_jax.planner import device_named
from infcl_jax.run.base import make_run
from infcl_jax.run.evaluate import changed_config
from infcl_jax.settings import check_config, keep_recorded, make_config, resolved_precision

BF16 = "dtype=bfloat16"


@pytest.mark.parametrize("model", [{"model": "tiny"}, {"model": "bert-tiny", "loss": "retrieval"}])
@pytest.mark.parametrize(
    ("settings", "device", "dtype"),
    [
        ({}, None, "float32"),
        ({}, "A10", "bfloat16"),
        ({"precision": "fp32"}, "A10", "float32"),
        ({"precision": "bf16"}, None, "bfloat16"),
        ({"model_overrides": BF16}, None, "bfloat16"),
        ({"model_overrides": "dtype=float32"}, "A10", "float32"),
    ],
)
def test_the_precision_is_the_dtype_of_the_towers_alone(model, settings, device, dtype):
    config = make_config(model | settings)
    target = jax.sharding.use_abstract_mesh(device_named(device).mesh) if device else contextlib.nullcontext()
    with target:
        towers = make_run(config).model_config
    assert (towers.dtype, towers.param_dtype) == (dtype, "float32")


def test_two_dtypes_are_an_error_that_names_both_settings():
    with pytest.raises(ValueError, match=r"no dtype in model_overrides with precision='fp32', got dtype=bfloat16"):
        make_config({"precision": "fp32", "model_overrides": BF16})


@pytest.mark.parametrize(
    ("saved", "resumed", "precision"),
    [
        ({}, {}, "fp32"),  # from before the setting
        ({"precision": "bf16"}, {}, "bf16"),  # started on a GPU
        ({"precision": "bf16"}, {"precision": "fp32"}, "fp32"),
        ({"model_overrides": BF16}, {"model_overrides": BF16}, "auto"),  # the override remains
        ({"model_overrides": BF16}, {}, "fp32"),  # resolved on this CPU
        ({"precision": "fp32"}, {"model_overrides": BF16}, "auto"),  # a dtype of the user's takes its place
    ],
)
def test_a_resumed_run_keeps_its_precision(saved, resumed, precision, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = keep_recorded(run.saved_config(tmp_path), make_config(resumed))
    assert resolved_precision(config.precision, config.model_overrides) == precision
    check_config(config)


@pytest.mark.parametrize(
    ("saved", "changes", "precision"),
    [
        ({}, {"model_overrides": BF16}, "auto"),
        ({"precision": "fp32"}, {"model_overrides": BF16}, "auto"),
        ({"precision": "bf16"}, {"precision": "fp32"}, "fp32"),
        ({"precision": "bf16"}, {"evaluation.gallery": 8}, "bf16"),
    ],
)
def test_an_evaluation_can_change_the_precision(saved, changes, precision, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert changed_config(tmp_path, changes)[0].precision == precision


def test_a_resumed_run_keeps_what_it_was_started_with(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_bad_records": 100}))
    old = run.saved_config(tmp_path)
    assert keep_recorded(old, make_config({})).max_bad_records == 100
    assert keep_recorded(old, make_config({"max_bad_records": 0.1})).max_bad_records == 0.1
