"""The attention benchmark: its records and table, what it calls exact, and its mistakes."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs

from experiments.benchmarks import attention as benchmark_attention
from experiments.benchmarks import timing
from experiments.benchmarks.attention import RECORDS_FILE, Settings, draw, exact_attention
from experiments.benchmarks.harness import OUT_OF_MEMORY
from infcl_jax.ops.attention.api import attend

MODULE = "experiments.benchmarks.attention"


@pytest.mark.parametrize("causal", [False, True])
def test_every_case_is_measured_printed_and_recorded(causal, tmp_path, capsys):
    settings = Settings(("xla",), batch=(2, 5), positions=(7, 12), heads=3, channels=8, causal=causal, repeats=1)
    records = benchmark_attention.measure_all(settings, oracle.mesh_of(1), tmp_path / "new")
    assert [json.loads(line) for line in (tmp_path / "new" / RECORDS_FILE).read_text().splitlines()] == records
    assert [(r["positions"], r["batch"]) for r in records] == [(7, 2), (7, 5), (12, 2), (12, 5)]
    _, headings, *rows = capsys.readouterr().out.splitlines()
    assert all(len(row) == len(headings) and row.endswith("ok") for row in rows)
    for record in records:
        assert 0 < record["forward_error"] < 1e-2 and 0 < record["gradient_error"] < 1e-2
        assert record["forward_ms"] > 0 and record["memory_mib"] > 0


def test_rates_count_what_the_formula_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(timing.Program, "seconds", lambda self, repeats: 0.01)
    settings = Settings(("xla",), batch=(6,), positions=(10,), heads=3, channels=8)
    (record,) = benchmark_attention.measure_all(settings, oracle.mesh_of(1), tmp_path)
    products, tensor = 6 * 3 * 10 * 10 * 8, 2 * 6 * 10 * 3 * 8
    assert record["forward_tflops"] == pytest.approx(2 * 2 * products / 1e10)
    assert record["tflops"] == pytest.approx(7 * 2 * products / 1e10)
    assert (record["forward_tbytes"], record["tbytes"]) == pytest.approx((4 * tensor / 1e10, 12 * tensor / 1e10))
    assert (record["total_ms"], record["backward_ms"]) == (10.0, 0.0)


def test_what_does_not_fit_is_said(tmp_path, monkeypatch):
    def attend(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")

    monkeypatch.setattr(benchmark_attention, "attend", attend)
    (record,) = benchmark_attention.measure_all(Settings(("xla",), (2,), (3,)), oracle.mesh_of(1), tmp_path)
    assert record["status"] == OUT_OF_MEMORY and record["forward_ms"] is None


@pytest.mark.parametrize("causal", [False, True])
def test_exact_is_the_oracle_and_its_gradient(causal):
    *inputs, cotangent = draw((2, 9, 3, 8), "float32")
    found = exact_attention(*inputs, cotangent, causal=causal)
    np.testing.assert_allclose(found[0], oracle.attention(*inputs, causal), rtol=1e-12)
    pull = jax.vjp(lambda *x: attend(*x, causal=causal, implementation="xla"), *map(jnp.asarray, inputs))[1]
    for exact, plain in zip(found[1:], pull(cotangent), strict=True):
        np.testing.assert_allclose(plain, exact, rtol=1e-4, atol=1e-5)


MISTAKES = {
    "unknown": (("--attention=flash",), "among xla, cudnn, mosaic_gpu, got 'flash'"),
    "no number": (("--positions=50,many",), "--positions to be positive integers"),
    "two devices": (("--devices=2",), "--devices=1.* got 2"),
    "no such device": (("--attention=mosaic_gpu",), "expected a Hopper GPU for attention .mosaic_gpu., got cpu"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line(mistake, tmp_path):
    arguments, message = MISTAKES[mistake]
    status, _, stderr = runs.command(MODULE, "--batch=2", "--heads=1", f"--output={tmp_path}", *arguments)
    assert status == 1
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", stderr), stderr
