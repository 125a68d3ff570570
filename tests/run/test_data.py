"""The parts of a run: which device decodes, and the batches that a step gets."""

import logging

import captioned
import jax
import numpy as np
import oracle
import pytest
import runs
from decoders import StandIn

from infcl_jax import run
from infcl_jax.grad_cache import chunk_rows
from infcl_jax.ops.color import ColorBatch
from infcl_jax.run import image_text
from infcl_jax.settings import changed_settings, make_config, total_steps, with_total_steps


@pytest.fixture
def photographs(tmp_path):
    """Settings of a run on JPEGs that are not much larger than the model's images."""
    samples = [(f"{i}", {"jpg": captioned.jpeg(i, (22, 20)), "txt": f"{i}".encode()}) for i in range(40)]
    captioned.write_folder(tmp_path / "images", samples)

    def settings(**changes):
        return runs.config(**({"dataset": str(tmp_path / "images"), "augmentation.flip": 0.5} | changes))

    return settings


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for the decoders of GPUs."""
    opened = []

    def open_decoders(devices, rows, size):
        opened.append((rows, size))
        return {device: StandIn(device) for device in devices}

    monkeypatch.setattr(image_text, "open_decoders", open_decoders)
    monkeypatch.setattr(
        image_text, "choose_decoder", lambda decode, offload: "pillow" if decode == "pillow" else "nvimgcodec"
    )
    return opened


def first_batches(config, mesh, count=3):
    data = run.training_data(config, run.training_source(config), mesh=mesh)
    batches = [run.next_batch(config, data, mesh) for _ in range(count)]
    data.close()
    return batches


def test_the_iterator_knows_that_gpus_decode(photographs, gpu):
    data = run.training_data(photographs(), run.training_source(photographs()), mesh=oracle.mesh_of(1))
    assert data.decodes_on_gpus
    data.close()


@pytest.mark.parametrize(
    ("loss", "positives", "devices"), [("clip", "pair", 1), ("clip", "image", 4), ("sogclr", "pair", 4)]
)
def test_every_decoder_gives_the_same_batches(photographs, gpu, loss, positives, devices):
    mesh = oracle.mesh_of(devices)
    host, decoded = (
        first_batches(photographs(decode=name, loss=loss, positives=positives), mesh) for name in ("pillow", "auto")
    )
    assert gpu == [(32 // devices, runs.SIDE)]
    for a, b in zip(host, decoded, strict=True):
        assert jax.tree.map(lambda leaf: leaf.sharding, a) == jax.tree.map(lambda leaf: leaf.sharding, b)
        jax.tree.map(np.testing.assert_array_equal, a, b)


LENGTHS = [
    ({}, 1000),
    ({"total_steps": 7}, 7),
    ({"samples_seen": 100}, 3),  # OpenCLIP: batches of 32
    ({"epochs": 3}, 3 * (40 // 32)),
    ({"epochs": 3, "batch_size": 8}, 3 * 5),
]


@pytest.mark.parametrize(("length", "steps"), LENGTHS, ids=str)
def test_the_length_of_a_run_is_resolved_to_steps(length, steps):
    config, source = make_config(runs.config(**({"total_steps": None} | length))), range(40)
    resolved = with_total_steps(config, source)
    assert (resolved.total_steps, resolved.samples_seen, resolved.epochs) == (steps, None, None)
    assert total_steps(resolved) == steps  # without the data
    changed = changed_settings(config, resolved)
    assert changed.keys() <= {"total_steps", "samples_seen", "epochs"}


@pytest.mark.parametrize(
    ("length", "source", "message"),
    [
        ({"epochs": 3}, range(40), "one of total_steps, samples_seen, epochs, got total_steps=6 and epochs=3; set all"),
        (
            {"total_steps": None, "samples_seen": 64, "epochs": 1},
            range(40),
            "got samples_seen=64 and epochs=1; set all",
        ),
        ({"total_steps": None, "samples_seen": 31}, None, "samples for a batch of 32, got samples_seen=31; use a"),
        ({"total_steps": None, "epochs": 5}, range(31), "samples for a batch of 32, got epochs=5; use a smaller"),
        ({"total_steps": None, "epochs": 5}, None, r"a source with epochs=5, got None; pass training_source\(config\)"),
    ],
)
def test_lengths_that_contradict_or_give_no_step_are_refused(length, source, message):
    with pytest.raises(ValueError, match=rf"^expected [^\n]*{message}[^\n]*$"):
        with_total_steps(runs.config(**length), source)


@pytest.mark.parametrize("make", [run.workload, run.initial_state])
def test_a_rule_for_no_parameter_is_refused(make):
    config = runs.config(**{"optimizer.learning_rate_rules": (("vision/.*", 0.1), (".*", 1.0))})
    with pytest.raises(ValueError, match=r"^expected every rule of optimizer.learning_rate_rules .* got 'vision/\.\*'"):
        make(config, 1 if make is run.workload else oracle.mesh_of(1))


def test_images_without_files_are_left_to_the_host(gpu):
    first_batches(runs.config(), oracle.mesh_of(1), 1)
    assert gpu == []


def test_without_memory_for_the_decoder_the_host_decodes(photographs, gpu, monkeypatch, caplog):
    def refuse(*args):
        raise ValueError("expected 9 GiB")

    monkeypatch.setattr(image_text, "open_decoders", refuse)
    with caplog.at_level(logging.WARNING):
        (batch,) = first_batches(photographs(), oracle.mesh_of(1), 1)
    assert "the host decodes images: expected 9 GiB" in caplog.text and isinstance(batch["image"], jax.Array)
    with pytest.raises(ValueError, match="expected 9 GiB"):
        first_batches(photographs(decode="nvimgcodec"), oracle.mesh_of(1))


COLORS = {
    "augmentation.color_jitter": (0.4, 0.4, 0.4, 0.1),
    "augmentation.color_jitter_prob": 0.8,
    "augmentation.gray_scale_prob": 0.2,
}


@pytest.mark.parametrize(
    "decode,offload", [("pillow", "none"), ("auto", "none"), ("pillow", "host"), ("pillow", "replay")]
)
def test_steps_get_images_with_colors(photographs, gpu, decode, offload):
    cache = {"grad_cache.offload": offload, "grad_cache.chunk_size": 8}
    mesh = oracle.mesh_of(4)
    (plain,) = first_batches(photographs(), mesh, 1)
    config = photographs(decode=decode, **cache, **COLORS)
    data = run.training_data(config, run.training_source(config), mesh=mesh)
    image = run.next_batch(config, data, mesh)["image"]
    if offload == "replay":
        image = jax.tree.map(lambda *chunks: np.concatenate(chunks), *map(image.load, range(4)))
        rows = np.concatenate([chunk_rows(number, 32, 8, 4) for number in range(4)])
        image = jax.tree.map(lambda array: array[np.argsort(rows)], image)
    data.close()
    assert isinstance(image, ColorBatch) and image.color.shape == (32, 7)
    np.testing.assert_array_equal(image.pixels, plain["image"])
    assert offload != "none" or image.color.sharding == image.pixels.sharding == plain["image"].sharding
