"""Packed texts in whole runs: the losses of padded ones, in every kind of run."""

import contextlib
import dataclasses
import re

import jax
import numpy as np
import oracle
import pytest
import runs
from retrieval_runs import settings as retrieval_settings
from retrieval_runs import write_corpus

import infcl_jax
from infcl_jax import run
from infcl_jax.data.packing import PackedEntry, Packing, TextPacker
from infcl_jax.ops.packing import PackedTokens
from infcl_jax.run import text_packing
from infcl_jax.run.base import make_run
from infcl_jax.run.build import build_run
from infcl_jax.settings import make_config, with_changes
from infcl_jax.training import METRICS_FILE, read_metrics, save_config

NOTHING = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None}
EVALUATED = {"evaluation.retrieval_dataset": "digits", "evaluation.zero_shot_dataset": "digits"}
MODEL = runs.OVERRIDES.replace(f"context_length={runs.CONTEXT}", "context_length=128")
SIGLIP = f"{MODEL},text.causal=False,text.pool='last'"
SMALL = runs.SMALL | NOTHING | {"model_overrides": MODEL}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def trained(workdir, **changes):
    """Train; return the losses of all steps and the results of the evaluation."""
    config = SMALL | {"total_steps": 8, "log_every": 1, "optimizer.learning_rate": 1e-4}
    results = infcl_jax.train(config | changes, workdir)
    lines = [line for line in read_metrics(workdir / METRICS_FILE) if "loss" in line]
    return np.array([line["loss"] for line in lines]), results, lines


def assert_same(packed, padded):
    np.testing.assert_allclose(packed[0], padded[0], rtol=1e-6)
    assert packed[1] == pytest.approx(padded[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        EVALUATED | {"total_steps": 200},
        {"grad_cache.chunk_size": 24, "grad_cache.offload": "replay"},
        pytest.param({"grad_cache.chunk_size": 16, "parameter_sharding": "fsdp"}, marks=pytest.mark.full),
        pytest.param({"grad_cache.chunk_size": 16, "grad_cache.offload": "host"}, marks=pytest.mark.full),
        pytest.param({"frozen": ("text",)}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_training_on_packed_texts_is_that_on_padded_ones(tmp_path, changes):
    packed, padded = (trained(tmp_path / name, **changes, text_packing=name) for name in ("auto", "off"))
    assert_same(packed, padded)
    assert all(line["data/padded_batches"] >= 0 for line in packed[2])
    assert not any("data/padded_batches" in line for line in padded[2])


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_padded_and_counted(tmp_path, monkeypatch):
    choose = text_packing.choose_packing

    def too_few_rows(run, devices):
        entry = choose(run, devices).packed["text"]
        fewer = dataclasses.replace(entry.packing, rows=1, row_length=116)
        return text_packing.TextPacking({"text": entry._replace(packing=fewer)}, {})

    monkeypatch.setattr("infcl_jax.run.base.choose_packing", too_few_rows)
    packed = trained(tmp_path / "packed")
    assert 0 < packed[2][-1]["data/padded_batches"] < 8
    assert_same(packed, trained(tmp_path / "padded", text_packing="off"))


def test_all_processes_pad_a_batch_that_does_not_fit_in_one(monkeypatch):
    packer = TextPacker({"text": PackedEntry(Packing(8, 4, 4), lambda ids: np.full(len(ids), 2), 2.0)}, devices=1)
    batch = packer.plan({"text": np.ones((4, 2), np.int32), "index": np.arange(4)})
    assert isinstance(packer.agree(batch)["text"], PackedTokens)
    monkeypatch.setattr("infcl_jax.data.packing.anywhere", lambda misfit: True)
    np.testing.assert_array_equal(packer.agree(batch)["text"], np.ones((4, 2)))
    assert packer.padded == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_overrides": SIGLIP}, "text padded, since the tower attends to padding"),
        (
            {"model_overrides": f"{MODEL},text.context_length=24"},
            r"text padded, since packing would leave .* of 24 tokens",
        ),
    ],
)
def test_texts_are_padded_with_a_reason_that_is_recorded(capsys, changes, reason):
    built = build_run(make_config(SMALL | changes), oracle.mesh_of(1))
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f".*texts: {reason}.*", line)
    assert built.config.text_packing == "off" and not built.text_packing.packed


def test_a_run_from_before_the_setting_goes_on_padded(tmp_path):
    config = make_config(SMALL)
    for name in ("now", "before"):
        (tmp_path / name).mkdir()
        values = {key: value for key, value in config.to_dict().items() if (name, key) != ("before", "text_packing")}
        save_config(tmp_path / name, values)
    resumed = [
        build_run(config, oracle.mesh_of(1), origin=tmp_path / name, recorded=run.saved_config(tmp_path / name))
        for name in ("now", "before")
    ]
    assert [built.config.text_packing for built in resumed] == ["auto", "off"]
    assert [bool(built.text_packing.packed) for built in resumed] == [True, False]


def test_queries_and_passages_are_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(text_packing, "MOST", 10.0)  # packs, though it saves little
    config = retrieval_settings(write_corpus(tmp_path), model_overrides="text.layers=1,text.context_length=64")
    mesh, losses = oracle.mesh_of(4), []
    for name in ("auto", "off"):
        built = make_run(with_changes(config, {"text_packing": name}), mesh, run.training_source(config))
        with contextlib.closing(built.open_iterator()) as data:
            batch = built.next_batch(data)
        assert [isinstance(batch[entry], PackedTokens) for entry in ("query", "passage")] == [name == "auto"] * 2
        losses.append(built.step(built.init.create(), batch)[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 4])
def test_batches_train_alike_on_other_numbers_of_devices(devices):
    """The texts of a batch are packed for its devices."""
    config, losses = runs.config(model_overrides=MODEL), []
    for mesh in (oracle.mesh_of(devices), oracle.mesh_of(8)):
        built = make_run(make_config(config), mesh, run.training_source(config))
        with contextlib.closing(built.open_iterator()) as data:
            data.set_state(data.get_state() | {"next_batch": 3})
            batch = built.next_batch(data)
        assert isinstance(batch["text"], PackedTokens)
        losses.append(built.step(built.init.create(), batch)[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_the_profile_is_the_same_for_any_number_of_processes(monkeypatch):
    built = make_run(make_config(runs.config()), oracle.mesh_of(1), run.training_source(runs.config()))
    towers = built.text_towers
    whole, _ = text_packing._profile(built, towers)["text"]
    shares = []

    def gather(share):
        shares.append(share)
        return shares

    monkeypatch.setattr(text_packing, "gather", gather)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        lengths, _ = text_packing._profile(built, towers)["text"]
    np.testing.assert_array_equal(lengths, whole)
