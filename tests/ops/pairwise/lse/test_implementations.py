"""The table of implementations: documentation, selection and workspace."""

import dataclasses
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from gpus import ALONE, described, under

from infcl_jax import pairwise_lse
from infcl_jax.ops.pairwise import implementations
from infcl_jax.ops.pairwise.fused_windows import WindowConfig
from infcl_jax.ops.pairwise.implementations import TABLE, best_implementation, check_device
from infcl_jax.ops.pairwise.lse import IMPLEMENTATIONS, available_implementations
from infcl_jax.planner.loss import loss_workspace

LOSSES = (Path(__file__).parents[4] / "docs" / "losses.md").read_text()
FEATURES = jax.ShapeDtypeStruct((8, 4), jnp.float32)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_implementation_is_documented_and_selectable(name):
    assert f"| `{name}` |" in LOSSES
    row = TABLE[name]
    with under(ALONE if row.requires else None):
        if name in available_implementations() and name != "triton":  # in an interpreter, see test_triton.py
            result = jax.eval_shape(lambda x, y: pairwise_lse(x, y, 1.0, implementation=name), FEATURES, FEATURES)
            assert [a.shape for a in result] == [(8,)] * 3
    if row.requires:
        with pytest.raises(ValueError, match=f"{name}.*expects {row.requires}, got cpu"):
            pairwise_lse(jnp.ones((2, 3)), jnp.ones((2, 3)), 1.0, implementation=name)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_planner_knows_the_memory_of_every_implementation(name, devices):
    small, large = (loss_workspace(name, devices * b, 512, "bfloat16", devices) for b in (1 << 20, 1 << 22))
    assert (large > 8 * small > 0) == TABLE[name].quadratic
    assert large > small


def without_triton(monkeypatch, error):
    monkeypatch.setitem(TABLE, "triton", dataclasses.replace(TABLE["triton"], package_error=lambda: error))


@pytest.mark.parametrize(
    ("capability", "triton", "dtype", "best", "warning"),
    [
        (None, False, "float32", "xla", False),
        ("9.0", True, "bfloat16", "mosaic_gpu", False),
        ("9.0", True, "float64", "xla", False),
        ("8.0", True, "float32", "triton", False),
        ("8.0", False, "float32", "xla", True),
        ("8.0", False, "float64", "xla", False),
        ("7.0", True, "float32", "xla", True),
    ],
)
def test_the_fastest_implementation_of_the_device_is_the_default(monkeypatch, capability, triton, dtype, best, warning):
    monkeypatch.setattr(implementations, "compute_capability", lambda: capability)
    without_triton(monkeypatch, None if triton else "no triton")
    implementations._warn_no_kernels.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert best_implementation(jnp.dtype(dtype)) == best
    assert ["no fused kernels" in str(w.message) for w in caught] == [True] * warning
    assert all(str(w.message).endswith("no triton") != triton for w in caught)


@pytest.mark.parametrize(("capability", "reason"), [("8.0", " (no triton)"), ("7.0", "")])
def test_a_missing_package_is_the_reason_only_on_a_supported_gpu(monkeypatch, capability, reason):
    monkeypatch.setattr(implementations, "compute_capability", lambda: capability)
    without_triton(monkeypatch, "no triton")
    with pytest.raises(ValueError, match="'triton' expects an Ampere, Ada or Hopper GPU") as error:
        check_device("triton", jnp.float32)
    assert f"got cpu{reason}; use one of" in str(error.value)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.requires])
def test_windows_fill_the_sms_of_the_gpu(name):
    with under(described(cores=78)):
        assert TABLE[name].backend("lse", True).windows == WindowConfig(sm_count=78)
    sizes = {WindowConfig(sms).best_size(65_536, 65_536, 1 << 27, 640, (128, 256)) for sms in (132, 108, 72, 58)}
    assert len(sizes) > 1
