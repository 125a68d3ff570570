"""Checkpoints: bit for bit, on other devices, after crashes; requirements of work directories."""

import functools
import json
import re
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from etils import epath
from oracle import mesh_of

from infcl_jax.training import (
    Checkpointer,
    OptimizerConfig,
    create_state,
    load_config,
    make_optimizer,
    prepare_workdir,
    save_config,
)
from infcl_jax.training.checkpoint_folder import read_results


class Towers(nn.Module):
    """Parameters in the places of a CLIP model's."""

    width: int = 4

    @nn.compact
    def __call__(self, image, text):
        self.param("logit_scale", nn.initializers.ones, (), jnp.float32)
        return nn.Dense(self.width, name="visual")(image.astype(jnp.float32)), nn.Embed(5, self.width, name="text")(
            text
        )


class Data:
    """Iterator reduced to its position; refuses positions of another seed."""

    def __init__(self, position=0, seed=0):
        self.position, self.seed = position, seed

    def get_state(self):
        return {"next_batch": self.position, "seed": self.seed}

    def set_state(self, state):
        if state["seed"] != self.seed:
            raise ValueError(f"the data state was saved with seed={state['seed']}, this run has {self.seed}")
        self.position = state["next_batch"]


def state_of(devices=8, steps=0, tx=None, **model):
    """A state after `steps` updates with arbitrary gradients."""
    tx = make_optimizer(OptimizerConfig(), 100) if tx is None else tx
    state = create_state(Towers(**model), tx, 2, 3, 0, mesh_of(devices))
    rng = np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        for _ in range(steps):
            state = state.apply_gradients(
                grads=jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), state.params)
            )
    return state


@functools.cache
def state_after(steps):
    """A shared state, which no test may donate."""
    return state_of(steps=steps)


def contents(state):
    return state.step, state.params, state.opt_state


def save(workdir, steps, **options):
    """Save checkpoints of `steps` with a data position of ten times the step."""
    with Checkpointer(workdir, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_after(step), Data(10 * step))


@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_is_restored_bit_for_bit_on_any_number_of_devices(tmp_path, devices):
    save(tmp_path, [3])
    data, template = Data(), state_of(devices)
    with Checkpointer(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest(template, data)
    assert runs.equal_bits(contents(restored), contents(state_of(steps=3)))
    assert not runs.equal_bits(contents(restored), contents(template))
    assert (int(restored.step), data.position) == (3, 30)
    for leaf, like in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
        assert leaf.sharding.device_set == like.sharding.device_set


def test_nothing_to_restore_leaves_state_and_data_alone(tmp_path):
    state, data = state_of(steps=1), Data(7)
    with Checkpointer(tmp_path / "new" / "folder") as checkpoints:
        assert checkpoints.restore_latest(state, data) is state
    assert data.position == 7


@pytest.mark.parametrize("keep", [1, 2])
def test_the_latest_are_kept(tmp_path, keep):
    save(tmp_path, [1, 2, 3], keep=keep)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [1, 2, 3][-keep:]


def test_a_step_is_saved_once(tmp_path):
    save(tmp_path, [2])
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, state_of(steps=1), Data(99))
        checkpoints.wait()
        data = Data()
        assert int(checkpoints.restore_latest(state_of(), data).step) == 2
    assert data.position == 20


def test_the_state_may_change_while_it_is_written(tmp_path):
    """A step consumes its state, so the checkpoint must not read from it later."""
    state = state_of(steps=1)
    expected = jax.device_get(contents(state))
    consume = jax.jit(lambda s: jax.tree.map(lambda a: a + jnp.ones_like(a), s), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, Data())
        jax.block_until_ready(consume(state))
        checkpoints.wait()
        assert runs.equal_bits(contents(checkpoints.restore_latest(state_of())), expected)


def test_a_checkpoint_that_was_not_finished_is_ignored(tmp_path):
    save(tmp_path, [1])
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "1", folder / "5.orbax-checkpoint-tmp")
    shutil.rmtree(folder / "5.orbax-checkpoint-tmp" / "data")
    with Checkpointer(tmp_path) as checkpoints:
        data = Data()
        assert int(checkpoints.restore_latest(state_of(), data).step) == 1
        checkpoints.save(5, state_of(steps=5), Data(50))
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 5


@pytest.mark.parametrize(
    ("changes", "data", "message"),
    [
        (
            {"width": 8},
            Data(),
            r"params/text/embedding is float32\[5, 4\] there and float32\[5, 8\] here; keep the run's",
        ),
        ({"tx": optax.sgd(1e-2)}, Data(), "opt_state/0/count is int32.* there and absent here"),
        (
            {"tx": make_optimizer(OptimizerConfig(clip_norm=1.0), 100)},
            Data(),
            "opt_state/.* is absent there|absent here",
        ),
        ({}, Data(seed=1), "saved with seed=0, this run has 1"),
    ],
    ids=["width", "optimizer", "clipping", "data"],
)
def test_a_checkpoint_of_another_run_is_refused_in_one_line(tmp_path, changes, data, message):
    save(tmp_path, [1])
    with (
        Checkpointer(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"),
    ):
        checkpoints.restore_latest(state_of(**changes), data)


def folders(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def corrupt(workdir, step):
    """Flip a bit in the largest file of a checkpoint."""
    path = max((workdir / "checkpoints" / str(step) / "state").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_skipped_and_set_aside(tmp_path, capsys):
    save(tmp_path, [1, 2])
    corrupt(tmp_path, 2)
    with Checkpointer(tmp_path) as checkpoints:
        data = Data()
        assert int(checkpoints.restore_latest(state_after(0), data).step) == 1
        assert data.position == 10
        assert re.fullmatch(r"checkpoint 2 in .* is damaged: state/\S+ has another checksum\n", capsys.readouterr().out)
        checkpoints.save(2, state_after(2), Data(20))
    assert folders(tmp_path) == ["1", "2", "2.damaged"]
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 2


def test_without_an_intact_checkpoint_nothing_is_restored(tmp_path):
    save(tmp_path, [1, 2])
    corrupt(tmp_path, 1)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "state")
    with (
        Checkpointer(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"^expected an intact checkpoint in [^\n]*2: [^\n]*missing; 1: [^\n]*$"),
    ):
        checkpoints.restore_latest(state_after(0))


@pytest.mark.parametrize(("steps", "restored"), [([1, 2], 1), ([2], None)])
def test_a_killed_save_leaves_the_state_before(tmp_path, steps, restored):
    save(tmp_path, steps)
    (tmp_path / "checkpoints" / "2" / "manifest.json").unlink()
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == restored
    save(tmp_path, [2])
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 2


@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, value):
    state = state_after(2)
    ruined = state.replace(params=state.params | {"text": {"embedding": state.params["text"]["embedding"] * value}})
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state_after(1), Data())
        with pytest.raises(FloatingPointError, match=r"^step 2: the norm of params/text/embedding [^\n]* is step 1; "):
            checkpoints.save(2, ruined, Data())
    assert folders(tmp_path) == ["1"]


def test_multiples_and_the_best_are_kept(tmp_path):
    values = {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.2, 5: 0.3, 6: 0.4}
    state = state_after(1)
    with Checkpointer(tmp_path, keep=1, keep_every=4, keep_best="top1") as checkpoints:
        for step, value in values.items():
            checkpoints.save(step, state, Data())
            checkpoints.record(step, {"top1": value})
        with pytest.raises(ValueError, match=r"^expected keep_best to be one of loss, got 'top1'$"):
            checkpoints.record(6, {"loss": 1.0})
    assert folders(tmp_path) == ["3", "4", "6"]


@pytest.mark.parametrize(("value", "kept"), [(0.95, ["3"]), (0.5, ["2", "3"]), (np.nan, ["2", "3"])])
def test_results_of_an_evaluation_that_a_later_process_repeats_count_for_the_best(tmp_path, value, kept):
    options = {"keep": 1, "keep_best": "top1"}
    with Checkpointer(tmp_path, **options) as checkpoints:
        checkpoints.save(2, state_after(1), Data())
        checkpoints.record(2, {"top1": 0.9})
        checkpoints.save(3, state_after(1), Data())
    assert folders(tmp_path) == ["2", "3"]
    with Checkpointer(tmp_path, **options) as checkpoints:
        assert checkpoints.latest_step() == 3
        checkpoints.record(3, {"top1": value})
    assert folders(tmp_path) == kept


def test_results_of_a_chosen_step_delete_no_newer_or_older_checkpoint(tmp_path):
    save(tmp_path, [1, 2, 3], keep=3)
    with Checkpointer(tmp_path, keep=1, resume="2") as checkpoints:
        checkpoints.record(2, {"top1": 0.5})
        checkpoints.record(1, {"top1": 0.5})  # not the state of this run
    assert folders(tmp_path) == ["1", "2", "3"]
    results = [read_results(epath.Path(tmp_path, "checkpoints", step)) for step in "123"]
    assert results == [{}, {"top1": 0.5}, {}]


def test_a_chosen_step_is_resumed_and_newer_ones_are_set_aside(tmp_path):
    save(tmp_path, [1, 2, 3], keep=3)
    with Checkpointer(tmp_path, keep=3, resume="1") as checkpoints:
        assert int(checkpoints.restore_latest(state_after(0)).step) == 1
        checkpoints.save(2, state_after(2), Data())
    assert folders(tmp_path) == ["1", "2", "2.superseded", "3.superseded"]


@pytest.mark.parametrize(("path", "step"), [("", 2), ("checkpoints/1", 1)])
def test_another_run_is_resumed_until_the_first_own_checkpoint(tmp_path, path, step):
    save(tmp_path / "other", [1, 2])
    for expected in (step, 5):
        with Checkpointer(tmp_path / "own", resume=str(tmp_path / "other" / path)) as checkpoints:
            assert checkpoints.latest_step() == expected
            checkpoints.save(5, state_after(5), Data())


@pytest.mark.parametrize("resume", ["7", "/nowhere"])
def test_a_checkpoint_to_resume_must_exist(tmp_path, resume):
    with (
        Checkpointer(tmp_path, resume=resume) as checkpoints,
        pytest.raises(ValueError, match=r"^expected resume to be"),
    ):
        checkpoints.latest_step()


def full_disk(folder):
    raise OSError(28, "No space left on device", str(folder))


def test_failed_saves_are_reported_and_tried_again(tmp_path, monkeypatch, capsys):
    state = state_after(1)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, Data())
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("infcl_jax.training.checkpoint.write_manifest", lambda folder, results: full_disk(folder))
            checkpoints.save(2, state, Data())
            with pytest.raises(OSError, match=r"^the last checkpoint was not saved; .* continues from step 1$"):
                checkpoints.wait()
        assert re.fullmatch(
            r"checkpoint of step 2 was NOT saved: No space left on device \(.*\)\n", capsys.readouterr().out
        )
        assert (checkpoints.failed_saves, folders(tmp_path)) == (1, ["1"])
        shutil.rmtree(tmp_path / "checkpoints")
        checkpoints.save(3, state, Data())
    assert folders(tmp_path) == ["3"]


def test_a_run_that_cannot_save_stops(tmp_path):
    state = state_after(1)
    checkpoints = Checkpointer(tmp_path, max_failed_saves=2)
    assert checkpoints.latest_step() is None
    (tmp_path / "checkpoints").write_text("in the way")
    checkpoints.save(1, state, Data())
    with pytest.raises(OSError, match=r"^2 checkpoint\(s\) in a row were not saved; .* continues from the start$"):
        checkpoints.save(2, state, Data())


@pytest.mark.parametrize("below", ["", "run"])
def test_a_workdir_that_cannot_be_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^cannot write to workdir [^\n]*file[^\n]*; choose another --workdir$"):
        prepare_workdir(tmp_path / "file" / below)


def test_a_configuration_comes_back(tmp_path):
    for config in ({"a": 1, "b": {"c": None, "d": [0.9, 1.0]}}, {"a": 2}):
        save_config(tmp_path, config)
        assert load_config(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_no_run_and_a_broken_one_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no run in {tmp_path} .*train one with this --workdir first"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"a": 1})[:-1])
    with pytest.raises(ValueError, match=r"^expected the configuration of a run in [^\n]*config.json[^\n]*$"):
        load_config(tmp_path)
