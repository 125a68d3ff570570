"""What the commands share; and the mistakes one can make, each reported in one line that says what to do."""

import re

import jax
import jax.numpy as jnp
import pytest
import runs
from jax.experimental.compilation_cache import compilation_cache

from experiments import command, train
from experiments.overrides import parse_overrides

CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" , ", {}),
        ("vision.layers=6", {"vision.layers": 6}),
        ("a=1, b = 2.5 ,c=x", {"a": 1, "b": 2.5, "c": "x"}),
        ("dtype=bfloat16,vision.remat=None", {"dtype": "bfloat16", "vision.remat": None}),
        ("vision.pool='avg'", {"vision.pool": "avg"}),
        ("a=b=c", {"a": "b=c"}),
        ("image_mean=(0.5,0.4,0.3),seed=1", {"image_mean": (0.5, 0.4, 0.3), "seed": 1}),
    ],
)
def test_overrides_are_read_as_python_values(text, expected):
    assert parse_overrides(text) == expected


@pytest.mark.parametrize("text", ["layers", "a=1,b", "=3"])
def test_overrides_of_another_form_are_refused(text):
    with pytest.raises(ValueError, match="expected model_overrides like"):
        parse_overrides(text)


@pytest.mark.parametrize("name", ["batch_size", "evaluation.batch_size"])
@pytest.mark.parametrize("size", [0, -8, 9])
def test_batches_must_suit_the_devices(name, size):
    with pytest.raises(ValueError, match=f"^expected {name} to be a multiple of the 8 devices, got {size}$"):
        command.start_devices(runs.config(**{name: size}))


def test_devices_cannot_be_simulated_once_jax_has_started():
    jax.devices()
    with pytest.raises(ValueError, match=r"cpu_devices=3 before JAX is first used; restart"):
        command.start_devices(runs.config(cpu_devices=3))


@pytest.fixture
def cache_hits():
    """Compiled programs found, however short their compilation; JAX's settings are left as they were."""
    hits = []

    def listen(event, **_):
        if event.endswith("/cache_hits"):
            hits.append(event)

    settings = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.monitoring.register_event_listener(listen)
    yield hits
    jax.monitoring.unregister_event_listener(listen)
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_compiled_programs_are_kept_for_the_next_start(tmp_path, cache_hits):
    folder = tmp_path / "new" / "folder"
    for expected in (0, 1):
        command.start_devices(runs.config(compilation_cache=str(folder)))
        jax.jit(lambda x: jnp.sin(x) + 1)(jnp.float32(1))  # another function each time, but the same program
        assert len(cache_hits) == expected and list(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [("total_steps", 0), ("log_every", 0), ("keep_checkpoints", 0), ("eval_every", -1), ("checkpoint_every", -1)],
)
def test_counts_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"^expected {name} >= {value + 1}, got {value}$"):
        train.check_counts(runs.config(**{name: value}))


@pytest.mark.parametrize("lead", [True, False])
def test_only_the_lead_speaks(lead, monkeypatch, capsys):
    monkeypatch.setattr(command.distributed, "is_lead", lambda: lead)
    command.say("hello")
    assert capsys.readouterr().out == ("hello\n" if lead else "")


TRAIN = ("experiments.train", "--config=configs/digits.py")
MISTAKES = {
    "misspelt key": (
        (*TRAIN, "--config.batchsize=3"),
        "no such setting: 'batchsize' Did you mean .batch_size.*; the keys are in configs/base.py",
    ),
    "value of another type": ((*TRAIN, "--config.batch_size=many"), "batch_size=many"),
    "unknown flag": ((*TRAIN, "--wrokdir=x"), "wrokdir.*workdir"),
    "words beside the flags": ((*TRAIN, "digits"), "--name=value.*digits"),
    "no config file": (("experiments.train", "--config=configs/none.py"), "configs/none.py.*get_config"),
    "no config": (("experiments.train",), "--config.*configs/quickstart.py"),
    "key without config": (("experiments.train", "--config.batch_size=3"), "--config too"),
    "no workdir": ((*TRAIN, "--workdir="), "--workdir"),
    "workdir below a file": ((*TRAIN, "--workdir={tmp}/file/run"), "cannot write.*choose another --workdir"),
    "dataset not prepared": (
        ("experiments.train", "--config=configs/base.py", "--config.data_dir={tmp}"),
        "python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=",
    ),
    "unknown model": ((*TRAIN, "--config.model=huge"), "huge.*tiny"),
    "unknown override": ((*TRAIN, "--config.model_overrides=vision.layer=1"), "vision.layer'.*vision.layers"),
    "uneven batch": ((*TRAIN, "--config.batch_size=33"), "multiple of the 4 devices, got 33"),
    "unknown implementation": ((*TRAIN, "--config.implementation=fast"), "implementation.*ring.*fast"),
    "siglip without bias": (
        (*TRAIN, "--config.loss=siglip", f"--config.model_overrides={runs.OVERRIDES}"),
        "model_overrides init_logit_bias",
    ),
    "nothing to evaluate": (("experiments.evaluate",), "train one with this --workdir first"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line_that_says_what_to_do(mistake, tmp_path):
    (tmp_path / "file").write_text("")
    (module, *arguments), message = MISTAKES[mistake]
    arguments = [f"--workdir={tmp_path}/run", *(argument.format(tmp=tmp_path) for argument in arguments)]
    process = runs.start(module, *arguments)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", stderr), stderr
