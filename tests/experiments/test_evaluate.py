"""Evaluation with other settings than the run's, and what a resumed run can change."""

import json
import re
import shutil

import benchmark_layout as layout
import captioned
import jax
import pytest
import runs

from configs.saved import get_config as saved_config
from infcl_jax import evaluate, train
from infcl_jax import run as parts
from infcl_jax.evaluation import Suite, format_table
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.training import Checkpointer, Safeguards, load_config, read_metrics

NOTHING = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None}


def settings(**changes):
    return runs.config(**(NOTHING | {"total_steps": 2} | changes))


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """optax's Adam mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, with nothing to evaluate on."""
    workdir = tmp_path_factory.mktemp("trained")
    assert train(settings(), workdir) == {}
    return workdir


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")


def test_an_evaluation_changes_what_it_uses(run, capsys):
    before = load_config(run)
    changes = {"evaluation.zero_shot_dataset": "digits", "evaluation.batch_size": 128}
    results = evaluate(run, changes)
    assert set(results) == {"zero_shot/top1", "zero_shot/top5", "zero_shot/mean_per_class_recall"}
    assert json.loads((run / "evaluation.json").read_text()) == {"step": 2, **results}
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["evaluation.batch_size: 64 -> 128", "evaluation.zero_shot_dataset: None -> 'digits'"]
    assert said[2:-1] == ["step 2:", *format_table(results).splitlines()]
    assert said[-1] == f"pictures: {run / 'curves.png'}" and not (run / "retrieval.png").exists()
    assert load_config(run) == before


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    layout.write_benchmark(folder / "wds_cifar10", layout.classified([0, 1, 2, 3, 4, 5, 0]))
    return folder


BENCHMARK_RESULTS = {f"cifar10/{name}" for name in ("top1", "top5", "mean_per_class_recall")}


def test_benchmarks_evaluate_a_run(run, benchmarks):
    arguments = (f"--workdir={run}", "--evaluations=cifar10", f"--data_dir={benchmarks}")
    status, stdout, stderr = runs.command("experiments.evaluate", *arguments)
    assert (status, stderr) == (0, "")
    assert "evaluations: [] -> ['cifar10']\n" in stdout
    results = json.loads((run / "evaluation.json").read_text())
    assert results.keys() == {"step"} | BENCHMARK_RESULTS
    saved = json.loads((run / "results.json").read_text())
    assert saved["environment"]["model"] == "tiny" and saved["environment"]["weights"] == f"{run}, step 2"
    assert saved["results"][0]["metrics"] == {name.partition("/")[2]: results[name] for name in BENCHMARK_RESULTS}
    assert (run / "results.csv").is_file() and (run / "results.html").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 64}, "expected batch_size=32, .* got 64; an evaluation changes only .*data_dir, .*evaluation$"),
        ({"model_overrides": "text.context_length=40"}, "params/.*; changed since then: model_overrides: '.*' -> '.*'"),
        ({"evaluation.galery": 3}, "got 'evaluation.galery'; did you mean 'evaluation.gallery'"),
    ],
)
def test_an_evaluation_cannot_change_the_rest(run, changes, message):
    with pytest.raises(ValueError, match=f"^[^\\n]*{message}[^\\n]*$"):
        evaluate(run, changes)
    assert not (run / "evaluation.json").exists()


def test_the_configuration_of_an_evaluation_is_printed(run):
    arguments = (f"--workdir={run}", "--config=configs/base.py", "--config.evaluation.gallery=5", "--print_config")
    process = runs.start("experiments.evaluate", *arguments, JAX_PLATFORMS="no_such_device")
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, "")
    assert "    config.evaluation.gallery = 5  # default: None\n" in stdout
    assert "    config.batch_size = 32  # default: 256\n" in stdout
    assert not (run / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"galery": 3}, "expected a run of this version in .*, got one with the setting galery"),
        ({"batch_size": "many"}, "expected a run of this version in .*many"),
    ],
)
def test_the_configuration_of_another_version_is_refused(run, change, message):
    (run / "config.json").write_text(json.dumps(load_config(run) | change))
    with pytest.raises(ValueError, match=message):
        evaluate(run)


FLAGS = ("--config.evaluation.retrieval_dataset=digits", "--config.evaluation.gallery=5")
COMMANDS = {
    "settings alone": (FLAGS, None),
    "file": (("--config=configs/digits.py", f"--config.model_overrides={runs.OVERRIDES}", *FLAGS), None),
    "file of another model": (("--config=configs/quickstart.py", *FLAGS), "expected model='tiny', .* 'tiny-shapes'"),
    "misspelt": (("--config.evaluation.galery=3",), "no such setting: .*; did you mean --config.evaluation.gallery"),
}


@pytest.mark.parametrize("case", list(COMMANDS))
def test_the_command_merges_its_settings_into_the_saved_ones(case, run):
    arguments, mistake = COMMANDS[case]
    status, stdout, stderr = runs.command("experiments.evaluate", *arguments, f"--workdir={run}")
    if mistake is None:
        assert (status, stderr) == (0, "")
        assert re.search(r"evaluation.gallery: (None|10) -> 5\n", stdout)
        assert stdout.endswith(f"pictures: {run / 'curves.png'}, {run / 'retrieval.png'}\n")
        assert (run / "retrieval.png").exists()
        assert "retrieval/text_to_image_r1" in json.loads((run / "evaluation.json").read_text())
    else:
        assert status == 1
        assert re.fullmatch(rf"error: [^\n]*{mistake}[^\n]*\n", stderr), stderr


def test_a_resumed_run_says_what_has_changed_and_measures_benchmarks(run, benchmarks, capsys):
    where = {"evaluations": ("cifar10",), "evaluation.data_dir": str(benchmarks)}
    results = train(settings(total_steps=3, log_every=2, **where), run)
    said = capsys.readouterr().out.splitlines()
    changes = [f"evaluation.data_dir: None -> '{benchmarks}'", "evaluations: [] -> ['cifar10']"]
    changes += ["log_every: 1 -> 2", "total_steps: 2 -> 3"]
    assert [line.split("  ", 1)[1] for line in said if " -> " in line] == changes
    assert load_config(run)["total_steps"] == 3
    *_, last, evaluated = read_metrics(run / "metrics.jsonl")
    assert (last["step"], results.keys()) == (3, BENCHMARK_RESULTS) and evaluated.items() >= results.items()


def test_moving_averages_are_evaluated_and_epochs_are_saved_as_steps(tmp_path, monkeypatch):
    """Two epochs of 70 images in batches of 32; train and evaluate get the averages of the checkpoint."""
    evaluated, jpeg = [], captioned.jpeg(0)
    monkeypatch.setattr(Suite, "results", lambda self, variables, *_, **__: evaluated.append(variables) or [])
    captioned.write_folder(tmp_path / "images", [(f"{i}", {"jpg": jpeg, "txt": f"{i}".encode()}) for i in range(70)])
    config = settings(dataset=str(tmp_path / "images"), total_steps=None, epochs=2, ema_decay=0.5, ema_warmup=True)
    workdir = tmp_path / "run"
    train(config, workdir)
    evaluate(workdir)
    saved = load_config(workdir)
    assert (saved["total_steps"], saved["epochs"]) == (4, None)
    state = parts.initial_state(saved_config(str(workdir)), data_mesh())
    with Checkpointer(workdir) as checkpoints:
        state = checkpoints.restore_latest(state)
    assert int(state.step) == 4 and not runs.equal_bits(state.ema["params"], state.params)
    for variables in evaluated:
        assert runs.equal_bits(variables, {"params": state.ema["params"]})
    train(config, workdir)  # the same length again: there is nothing left to train
    assert len(evaluated) == 3


def test_each_evaluation_of_a_run_is_a_table_once(run, capsys):
    zero_shot = {"evaluation.zero_shot_dataset": "digits", "evaluation.retrieval_dataset": None}
    results = train(runs.config(total_steps=4, eval_every=1, **zero_shot), run)
    said = [line[10:] for line in capsys.readouterr().out.splitlines()]  # without the time of day
    tables = [number for number, line in enumerate(said) if re.fullmatch(r"step \d:", line)]
    assert [said[number] for number in tables] == [f"step {step}:" for step in (2, 3, 4)]  # 2: without evaluations
    assert said[tables[-1] + 1 :] == format_table(results).splitlines()
    assert all(said[number + 1] == said[tables[-1] + 1] for number in tables)  # the columns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.name": "lamb"}, "^expected optimizer.name='adamw', with which .* got 'lamb'; keep it, or choose"),
        ({"split": "validation"}, "^expected 1258 samples, with which .* got 270 in digits, split validation; "),
        ({"optimizer.clip_norm": None}, "opt_state/.*; changed since then: optimizer.clip_norm: 1.0 -> None$"),
        ({"loss": "fastclip_v1"}, "samples/.*; changed since then: loss: 'clip' -> 'fastclip_v1'$"),
    ],
)
def test_a_resumed_run_cannot_change_what_its_state_means(run, changes, message):
    before = load_config(run)
    with pytest.raises(ValueError, match=message):
        train(settings(total_steps=3, **changes), run)
    assert load_config(run) == before


@pytest.mark.parametrize("total_steps", [2, 3])
def test_a_resumed_run_that_fails_leaves_the_configuration_alone(run, total_steps, monkeypatch):
    def fail(*arguments):
        raise FloatingPointError("step 3: the loss became NaN")

    monkeypatch.setattr(Safeguards, "check", fail)
    monkeypatch.setattr(Suite, "__call__", fail)
    before = load_config(run)
    with pytest.raises((FloatingPointError, ValueError), match="step 3: the loss became NaN"):
        train(settings(total_steps=total_steps, **{"optimizer.learning_rate": 1e3}), run)
    assert load_config(run) == before


def test_without_a_saved_configuration_the_checkpoint_alone_decides(run):
    (run / "config.json").unlink()
    train(settings(total_steps=3), run)
    assert load_config(run)["total_steps"] == 3
