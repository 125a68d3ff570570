"""The training step of every shipped configuration equals the undivided loss."""

import jax
import oracle
import pytest
import runs

from configs import base, digits, disco_clip, dpr, fastclip, inf_cl, openclip, quickstart, siglip
from infcl_jax import run
from infcl_jax.run.verification import small_config
from infcl_jax.settings import make_config, with_changes
from infcl_jax.training import TrainState

SHIPPED = {
    "base": base.get_config,
    "digits": digits.get_config,
    "disco_clip": disco_clip.get_config,
    "disco_clip:implementation=disco": lambda: disco_clip.get_config("laion100m,implementation=disco"),
    "dpr": dpr.get_config,
    "dpr with a guide": lambda: with_changes(make_config(dpr.get_config()), {"guide.model": "unread"}),
    "dpr:gpus=8": lambda: dpr.get_config("gpus=8"),
    "inf_cl": inf_cl.get_config,
    "inf_cl:experiment=clip,offload=yes": lambda: inf_cl.get_config("laion400m,experiment=clip,offload=yes"),
    "openclip": openclip.get_config,
    "quickstart": quickstart.get_config,
    "siglip": siglip.get_config,
    "siglip:siglit": lambda: siglip.get_config("siglit"),
    **{
        f"fastclip:{size},loss={loss}": lambda size=size, loss=loss: fastclip.get_config(f"{size},loss={loss}")
        for size, experiments in fastclip._EXPERIMENTS.items()
        for loss in next(iter(experiments.values()))
    },
}


def mark(name):
    """Sizes of FastCLIP differ in the model, which is small here, in the optimizer and in the schedule of gamma.

    `CHANGES` has its other losses, with small towers. Cases with the mark `full` combine what others have alone.
    """
    repeated = (":" in name and name != "fastclip:medium,loss=fastclip_v3") or name in REPEATED
    return pytest.mark.full if repeated else pytest.mark.slow


REPEATED = ("base", "digits", "disco_clip", "quickstart")  # CLIP's loss, as in openclip
REPEATED += ("fastclip_v0", "fastclip_v1", "chunks", "captions, any, smoothed", "last group unlocked")
REPEATED += ("inf_cl", "matryoshka")  # its loss in chunks, as in "frozen tower"; with chunks in "teacher" and "guide"
REPEATED += ("openclip", "siglip", "dpr")  # with a small batch, the run of `experiments.verify` and dpr with a guide


CHANGES = {
    "fastclip_v0": {"loss": "fastclip_v0"},
    "fastclip_v1": {"loss": "fastclip_v1"},
    "matryoshka": {"matryoshka": (16, 64), "positives": "label", "grad_cache.chunk_size": 16},
    "chunks": {"grad_cache.chunk_size": 16, "grad_cache.keep": 1},
    "chunks in host memory": {"grad_cache.chunk_size": 16, "grad_cache.offload": "host", "loss": "fastclip_v2"},
    "replayed chunks": {"grad_cache.chunk_size": 16, "grad_cache.offload": "replay"},
    "frozen tower": {"frozen": ("image",), "grad_cache.chunk_size": 16},
    "last group unlocked": {"frozen": ("image",), "unlocked_groups.image": 1},
    "sharded parameters": {"parameter_sharding": "fsdp"},
    "siglip by image": {
        "loss": "siglip",
        "positives": "image",
        "model_overrides": f"{runs.OVERRIDES},init_logit_bias=-10.0",
    },
    "teacher": {"distill.teacher": "unread", "grad_cache.chunk_size": 16, "matryoshka": (16, 64)},
    "guide": {"guide.model": "unread", "guide.margin": 0.1, "grad_cache.chunk_size": 16, "matryoshka": (16, 64)},
    "captions, any, smoothed": {"positives": "caption", "multi_positive": "any", "label_smoothing": 0.1},
    "ring in bf16 with dropout": {
        "implementation": "ring",
        "model_overrides": f"{runs.OVERRIDES},dtype=bfloat16,text.dropout=0.1,vision.patch_dropout=0.5",
    },
}


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


def test_the_shapes_are_small():
    config = runs.config(**{"matryoshka": (16, 65), "grad_cache.chunk_size": 16, "grad_cache.keep": -1})
    small = small_config(make_config(config), 8)
    assert (small.batch_size, small.grad_cache.chunk_size, small.grad_cache.keep) == (8, 4, 1)
    model = run.read_model_config(small)
    assert (model.embed_dim, model.vision.width, model.vision.heads, model.vision.layers) == (128, 128, 2, 1)


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in CHANGES])
def test_the_step_passes(name):
    changes = CHANGES[name]
    report = run.verify_run(runs.config(**changes), oracle.mesh_of(4))
    assert report.ok, str(report)
    assert max(group.error for group in report.groups) < 1e-4


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in SHIPPED])
def test_a_shipped_configuration_passes(name):
    report = run.verify_run(SHIPPED[name](), oracle.mesh_of(4))
    assert report.ok, str(report)


@pytest.mark.slow
def test_a_mistake_in_the_trainer_is_named(monkeypatch):
    apply_gradients = TrainState.apply_gradients

    def decayed(self, **changes):
        state = apply_gradients(self, **changes)
        return state.replace(params=jax.tree.map(lambda p: 0.9 * p, state.params))

    monkeypatch.setattr(TrainState, "apply_gradients", decayed)
    report = run.verify_run(runs.config(frozen=("text",)), oracle.mesh_of(2))
    assert report.verdict == "wrong: frozen_moved"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rtol", "status", "verdict"),
    [("1e-3", 0, "right: "), pytest.param("1e-12", 1, "wrong: low_precision", marks=pytest.mark.full)],
)
def test_the_exit_status_is_the_verdict(rtol, status, verdict, tmp_path):
    flags = (*runs.flags(runs.config(cpu_devices=2)), f"--rtol={rtol}", f"--output={tmp_path / 'errors.png'}")
    finished = runs.command("experiments.verify", *flags, cpu_devices=2)
    assert (finished.returncode, verdict in finished.stdout) == (status, True), finished
    assert (tmp_path / "errors.png").exists()
