"""Shared parts of the commands, and user errors in one line with advice."""

import re
import runpy

import jax
import pytest
import runs
from absl import flags
from ml_collections import config_flags

import experiments.command  # noqa: F401  (registers the parsers of settings)
from configs import base, digits
from infcl_jax import run, train
from infcl_jax.run.build import start_devices
from infcl_jax.runtime import console
from infcl_jax.runtime.console import say
from infcl_jax.settings import (
    SETTINGS,
    check_config,
    make_config,
    parse_overrides,
    scaled_learning_rate,
)


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


@pytest.mark.parametrize(("name", "size"), [("batch_size", 0), ("batch_size", -8), ("evaluation.batch_size", 9)])
def test_batches_must_suit_the_devices(name, size):
    with pytest.raises(ValueError, match=f"^expected {name} to be a multiple of the 8 devices, got {size}$"):
        start_devices(runs.config(**{name: size}))


def test_devices_cannot_be_simulated_once_jax_has_started():
    jax.devices()
    with pytest.raises(ValueError, match=r"cpu_devices=3 before JAX is first used; restart"):
        start_devices(runs.config(cpu_devices=3))


def test_simulated_devices_have_no_effect_on_other_platforms(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert start_devices(runs.config(cpu_devices=3)).size == 8


def parsed(*arguments, config=None):
    """A configuration, by default `configs/base.py`, with changes from the command line."""
    values, argv = flags.FlagValues(), ["program", *arguments]
    config = config_flags.DEFINE_config_dict("config", config or base.get_config(), flag_values=values, sys_argv=argv)
    values(argv)
    return config.value


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ((), 5e-4 * 256 / 1024),
        (("--config.batch_size=2048",), 1e-3),
        (("--config.batch_size=2048", "--config.optimizer.learning_rate=0.1"), 0.1),
    ],
)
def test_a_scaled_learning_rate_follows_the_batch_size(flags, rate):
    config = base.get_config()
    config.optimizer.learning_rate = scaled_learning_rate(config, 5e-4, 1024)
    scaled = parsed(*flags, config=config)
    assert make_config(scaled).optimizer.learning_rate == pytest.approx(rate)
    assert scaled.to_dict()["optimizer"]["learning_rate"] == pytest.approx(rate)


@pytest.mark.parametrize(("text", "value"), [("12.8e9", 12_800_000_000), ("1E6", 1_000_000), ("1_000", 1000)])
def test_integers_may_have_an_exponent(text, value):
    assert parsed(f"--config.samples_seen={text}").samples_seen == value


@pytest.mark.parametrize(("text", "value"), [("0.05", 0.05), ("200", 200), ("None", None)])
def test_the_limit_of_bad_records_is_a_number_or_a_fraction(text, value):
    assert parsed(f"--config.max_bad_records={text}").max_bad_records == value


@pytest.mark.parametrize("name", ["dataset", "seed", "optimizer.eps"])
def test_none_is_no_value_of_other_settings(name):
    with pytest.raises(ValueError, match=f"^expected {name} to be (an integer|a number|a string), got None$"):
        check_config(parsed(f"--config.{name}=None"))


def test_groups_of_settings_are_not_replaced():
    with pytest.raises(flags.Error, match=r"expected single settings such as --config.optimizer.name=adamw"):
        parsed("--config.optimizer={'name': 'sgd'}")


def test_a_chunk_larger_than_the_batch_is_refused(tmp_path):
    config = runs.config(**{"grad_cache.chunk_size": 33})
    for check in (lambda: train(config, tmp_path), lambda: run.workload(config, 8)):
        with pytest.raises(ValueError, match=r"^expected grad_cache.chunk_size <= batch_size=32, got 33;.*"):
            check()


@pytest.mark.parametrize(
    "override",
    ["vision.mlp_ratio=None", "image_mean=0.5", "image_std=(1,2)", "init_logit_scale=x", "embed_dim='8'", "dtype=5"],
)
def test_model_overrides_of_another_type_are_named(override):
    name = override.partition("=")[0]
    with pytest.raises(ValueError, match=f"^expected model_overrides {name} to be [^\n]*, got [^\n]*$"):
        run.read_model_config(runs.config(model_overrides=override))


@pytest.mark.parametrize("override", ["vision.remat=None,init_logit_bias=-10", "init_logit_bias=None,dropout=0"])
def test_model_overrides_of_their_types_are_not(override):
    override = override.replace("dropout", "text.dropout")
    assert run.read_model_config(runs.config(model_overrides=f"text.vocab_size=259,{override}"))


@pytest.mark.parametrize("lead", [True, False])
def test_only_the_lead_speaks(lead, monkeypatch, capsys):
    monkeypatch.setattr(console, "is_lead", lambda: lead)
    say("hello")
    assert capsys.readouterr().out == ("hello\n" if lead else "")


TRAIN = ("experiments.train", "--config=configs/digits.py")
MISTAKES = {
    "misspelt key": (
        (*TRAIN, "--config.batchsize=3"),
        "no such setting: batchsize; did you mean --config.batch_size[?] --help lists the settings",
    ),
    "other library's name": (
        (*TRAIN, "--config.optimizer.lr=1"),
        "no such setting: optimizer.lr; did you mean --config.optimizer.learning_rate[?] --help lists",
    ),
    "value of another type": ((*TRAIN, "--config.batch_size=many"), "batch_size=many: expected an integer, got 'many'"),
    "unknown flag": ((*TRAIN, "--wrokdir=x"), "wrokdir.*workdir"),
    "words beside the flags": ((*TRAIN, "digits"), "--name=value.*digits"),
    "no config file": (("experiments.train", "--config=configs/none.py"), "configs/none.py.*get_config"),
    "no config": (("experiments.train",), "--config.*configs/quickstart.py"),
    "key without config": (("experiments.train", "--config.batch_size=3"), "--config too"),
    "no GPU decoder": ((*TRAIN, "--config.decode=nvimgcodec"), "nvimgcodec.*; choose decode='auto' or 'pillow'"),
    "no workdir": ((*TRAIN, "--workdir="), "--workdir"),
    "workdir below a file": ((*TRAIN, "--workdir={tmp}/file/run"), "cannot write.*choose another --workdir"),
    "dataset not prepared": (
        ("experiments.train", "--config=configs/base.py", "--config.data_dir={tmp}"),
        "python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=",
    ),
    "unknown model": ((*TRAIN, "--config.model=huge"), "expected model .*tiny.* got 'huge'"),
    "unknown tokenizer": ((*TRAIN, "--config.tokenizer=bpe"), "expected the tokenizer to be 'bytes', .* got 'bpe'"),
    "no vocabulary": ((*TRAIN, "--config.tokenizer=clip:{tmp}/no"), "expected a CLIP vocabulary at {tmp}/no, got no"),
    "too small a vocabulary": (
        (*TRAIN, "--config.model_overrides=text.vocab_size=100"),
        "expected text.vocab_size >= 259 .* got 100 .*; set text.vocab_size=259",
    ),
    "unknown override": ((*TRAIN, "--config.model_overrides=vision.layer=1"), "vision.layer'.*vision.layers"),
    "uneven batch": ((*TRAIN, "--config.batch_size=33"), "multiple of the 4 devices, got 33"),
    "unknown implementation": ((*TRAIN, "--config.implementation=fast"), "implementation.*ring.*fast"),
    "key of a single value": (
        (*TRAIN, "--config.model_overrides.dtype=x"),
        "no such setting: model_overrides.dtype; .* --config.model_overrides=",
    ),
    "folder below a file": (
        (*TRAIN, "--config.compilation_cache={tmp}/file/x"),
        "compilation_cache .* {tmp}/file/x .*another folder, or 'off'",
    ),
    "siglip without bias": (
        (*TRAIN, "--config.loss=siglip", f"--config.model_overrides={runs.OVERRIDES}"),
        "model_overrides init_logit_bias",
    ),
    "nothing to evaluate": (("experiments.evaluate", "--config.seed=1"), "train one with this --workdir first"),
    "evaluation of nothing": (("experiments.evaluate", "--config.seed=1", "--workdir="), "expected --workdir"),
}


def test_the_help_lists_flags_and_settings():
    process = runs.start("experiments.plan", "--help")
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, "")
    assert stdout.startswith("Plan the memory and the time of a run without running it.\n")
    for name in ("config", "print_config", "traceback", "memory_gib", *(f"config.{name}" for name in SETTINGS)):
        assert f"\n  --{name}=" in stdout


def test_the_printed_configuration_is_a_configuration_file(tmp_path):
    arguments = ("--config=configs/digits.py", "--config.batch_size=96", "--config.frozen=('text',)", "--print_config")
    process = runs.start("experiments.train", *arguments, JAX_PLATFORMS="no_such_device")
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, "")
    assert "    config.batch_size = 96  # default: 256\n" in stdout
    (tmp_path / "printed.py").write_text(stdout)
    config = digits.get_config()
    config.update(batch_size=96, frozen=("text",))
    assert runpy.run_path(str(tmp_path / "printed.py"))["get_config"]() == config


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line_that_says_what_to_do(mistake, tmp_path):
    (tmp_path / "file").write_text("")
    (module, *arguments), message = MISTAKES[mistake]
    arguments = [f"--workdir={tmp_path}/run", *(argument.format(tmp=tmp_path) for argument in arguments)]
    status, _, stderr = runs.command(module, *arguments)
    assert status == 1
    assert re.fullmatch(rf"error: [^\n]*{message.replace('{tmp}', str(tmp_path))}[^\n]*\n", stderr), stderr
