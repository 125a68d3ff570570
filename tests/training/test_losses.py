"""Table of the training losses, and the data source of a run."""

import jax
import numpy as np
import oracle
import pytest
import runs

from infcl_jax import run, siglip_loss
from infcl_jax.losses.variants import VARIANTS
from infcl_jax.models import CLIPOutput
from infcl_jax.ops.pairwise.lse import IMPLEMENTATIONS, available_implementations
from infcl_jax.run import image_text
from infcl_jax.training import LOSSES, make_loss

ROWS = 8


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "retrieval"])  # see tests/run
def test_every_loss_computes_from_its_inputs_on_any_number_of_devices(name):
    image, text = oracle.features("random", ROWS, ROWS, 33)
    output, index = CLIPOutput(image, text, np.float32(10), np.float32(-1)), np.arange(ROWS, dtype=np.int32)
    results = []
    for devices in (1, 4):
        loss = make_loss(name, oracle.mesh_of(devices), steps_per_epoch=2)
        samples = loss.init_samples(ROWS, 2.0)
        available = {"index": index, "samples": samples, "step": np.int32(0)}

        def value(output, inputs, loss=loss):
            result = loss(output, **inputs)
            return result.value, (result.rows, result.logit_scale)

        step = jax.jit(jax.value_and_grad(value, has_aux=True))
        (_, (rows, _)), _ = result = step(output, {key: available[key] for key in loss.inputs})
        assert loss.name == name
        assert (samples is None) == (rows is None) == (not loss.inputs) == (name not in VARIANTS)
        if rows is not None:
            np.testing.assert_array_equal(loss.write(samples, index, rows).log_u[:ROWS], rows.log_u)
        results.append(jax.device_get(result))
    for one, several in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(several, one, rtol=1e-4, atol=1e-6)


def test_implementations_are_those_of_the_function():
    image, text = oracle.features("random", ROWS, ROWS, 33)
    supported = LOSSES["siglip"].implementations
    available = [name for name in supported if name in available_implementations()]
    values = [siglip_loss(image, text, 10.0, -1.0, implementation=name) for name in available]
    np.testing.assert_allclose(values, values[0], rtol=1e-6)
    with pytest.raises(ValueError, match="expected implementation"):
        siglip_loss(image, text, 10.0, -1.0, implementation=next(n for n in IMPLEMENTATIONS if n not in supported))


@pytest.mark.parametrize("loss", ["clip", "isogclr"])
def test_a_run_loads_its_data_once(loss, monkeypatch):
    loaded, load = [], image_text.load_source
    monkeypatch.setattr(image_text, "load_source", lambda *args: loaded.append(args) or load(*args))
    config, mesh = runs.config(loss=loss), oracle.mesh_of(1)
    source = run.training_source(config)
    run.loss(config, mesh, source)
    run.training_data(config, source).close()
    state, planned = run.initial_state(config, mesh, source), run.workload(config, 1, source=source)
    assert len(loaded) == 1
    assert planned.sample_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state.samples))
    assert (run.sample_source(config) is None) == (loss == "clip")


def test_sample_state_needs_the_data():
    config, mesh = runs.config(loss="fastclip_v3"), oracle.mesh_of(1)
    for make in (lambda: run.loss(config, mesh), lambda: run.workload(config, 1)):
        with pytest.raises(ValueError, match=r"^expected a source with loss 'fastclip_v3', got None; pass"):
            make()
