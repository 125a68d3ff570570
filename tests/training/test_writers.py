"""CSV, TensorBoard and Weights & Biases: equal scalars, and what resuming keeps."""

import contextlib
import csv
import json
import math
import sys
import types

import pytest

from infcl_jax.runtime.outputs import Outputs
from infcl_jax.training import MetricWriter
from infcl_jax.training.writers import check_writers


def write_steps(workdir, steps, **options):
    with MetricWriter(workdir, **options) as writer:
        for step in steps:
            writer.write(step, {"loss": float(step), "zero_shot/top1": 0.5})


def csv_steps(workdir):
    with (workdir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["time"]) > 1e9 for row in rows)
    return [(row["name"], int(row["step"]), float(row["value"])) for row in rows]


def tensorboard_steps(workdir):
    """Read event files: records of length (8 bytes), checksum (4), Event, checksum (4)."""
    from tensorboardX.proto import event_pb2

    scalars = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            if event.HasField("session_log"):  # TensorBoard hides earlier files from this step on
                scalars = [scalar for scalar in scalars if scalar[1] < event.step]
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + size :]
    return scalars


class Wandb(types.ModuleType):
    """Stand-in for wandb 0.31: what a server would know of the runs."""

    def __init__(self):
        super().__init__("wandb")
        self.errors = types.SimpleNamespace(Error=RuntimeError, UsageError=type("UsageError", (RuntimeError,), {}))
        self.runs, self.calls, self.in_use, self.raises = {}, [], None, None

    def login(self):
        if self.raises:
            raise self.raises

    def teardown(self):
        self.in_use = None

    def init(self, **arguments):
        assert self.in_use != arguments["id"], "run ID is in use"
        self.calls.append(arguments)
        if self.raises and arguments.get("mode") != "offline":
            self.in_use = arguments["id"]
            raise self.raises
        run = self.runs.setdefault(arguments["id"], WandbRunOnServer())
        run.first = max(run.history, default=-1) + 1
        return run


class WandbRunOnServer:
    def __init__(self):
        self.history, self.broken, self.first = {}, False, 0

    @property
    def step(self):
        return max((self.first, *self.history))

    def log(self, scalars, step):
        if self.broken:
            raise ConnectionError("no network")
        assert step >= self.step, "W&B ignores steps that go back, with a warning"
        self.history.setdefault(step, {}).update(scalars)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def wandb_steps(wandb):
    (run,) = wandb.runs.values()
    return [(name, step, value) for step, scalars in run.history.items() for name, value in scalars.items()]


def test_all_writers_get_the_same_scalars_and_continue(tmp_path, wandb):
    options = {"writers": ("csv", "tensorboard", "wandb"), "settings": {"batch_size": 32, "resume": "latest"}}
    write_steps(tmp_path, [10, 20, 30], **options)
    write_steps(tmp_path, [30, 40], resume_step=20, **options)
    expected = [scalar for step in (10, 20, 30, 40) for scalar in (("loss", step, step), ("zero_shot/top1", step, 0.5))]
    assert csv_steps(tmp_path) == tensorboard_steps(tmp_path) == wandb_steps(wandb) == expected
    first, second = wandb.calls
    assert first == second and first["config"] == options["settings"] and first["name"] == tmp_path.name


@pytest.mark.parametrize("torn", [b"40", b"40,1.5,lo", b"40,1.5,loss,4", b"\xff"])
def test_a_torn_row_is_dropped(tmp_path, torn):
    write_steps(tmp_path, [10, 20], writers=("csv",))
    with (tmp_path / "metrics.csv").open("ab") as file:
        file.write(torn)
    write_steps(tmp_path, [30], writers=("csv",))
    assert [step for name, step, _ in csv_steps(tmp_path) if name == "loss"] == [10, 20, 30]


def test_csv_keeps_values_and_names_exactly(tmp_path):
    values = {"loss": 0.1 + 0.2, 'a,"b"': math.inf, "none": math.nan, "count": 3}
    with MetricWriter(tmp_path, writers=("csv",)) as writer:
        writer.write(1, values)
    read = {name: value for name, _, value in csv_steps(tmp_path)}
    assert read.pop("none") != read.get("none") and read == {k: v for k, v in values.items() if k != "none"}


def test_a_run_set_back_is_a_new_run_of_wandb(tmp_path, wandb):
    write_steps(tmp_path, [10, 20, 30], writers=("wandb",), settings={"resume": "latest"})
    write_steps(tmp_path, [20, 30], writers=("wandb",), settings={"resume": "10"}, resume_step=10)
    write_steps(tmp_path, [40], writers=("wandb",), settings={"resume": "latest"}, resume_step=30)
    assert [list(run.history) for run in wandb.runs.values()] == [[10, 20, 30], [20, 30, 40]]
    assert len({call["group"] for call in wandb.calls}) == 1


def test_wandb_shows_a_failed_run(tmp_path, wandb):
    with pytest.raises(KeyError), MetricWriter(tmp_path, writers=("wandb",)):
        raise KeyError
    assert [run.exit_code for run in wandb.runs.values()] == [1]


def test_a_login_that_is_missing_is_an_error_and_a_missing_network_is_not(tmp_path, wandb, capsys):
    wandb.raises = wandb.errors.UsageError("api_key not configured\n(no-tty)")
    with pytest.raises(
        ValueError, match=r"^expected a login .*api_key not configured \(no-tty\); .*WANDB_MODE=offline$"
    ):
        MetricWriter(tmp_path, writers=("wandb",))
    wandb.raises = wandb.errors.Error("timed out")
    said = []
    with MetricWriter(tmp_path, writers=("wandb",), outputs=Outputs(said.append)) as writer:
        writer.write(1, {"loss": 1.0})
        next(iter(wandb.runs.values())).broken = True
        writer.write(2, {"loss": 1.0})
        writer.write(3, {"loss": 1.0})
    assert wandb_steps(wandb) == [("loss", 1, 1.0)]
    assert said == [
        "warning: W&B: timed out; the run is recorded offline, upload it with wandb sync",
        "warning: W&B: no network; the run continues",
    ]
    assert len(json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])) == 3


@pytest.mark.parametrize(
    ("mode", "error", "fails"),
    [
        ("online", "UsageError", True),
        ("online", "Error", False),
        ("offline", "UsageError", False),
        ("disabled", "UsageError", False),
    ],
)
def test_the_login_is_checked_alone(wandb, monkeypatch, mode, error, fails):
    monkeypatch.setenv("WANDB_MODE", mode)
    wandb.raises = getattr(wandb.errors, error)("no API key")
    with pytest.raises(ValueError, match=r"expected a login .*no API key") if fails else contextlib.nullcontext():
        check_writers(("csv", "wandb"))
    check_writers(("csv",))
    assert not wandb.calls


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"for the writer '{name}', found none; pip install {module}"):
        MetricWriter(tmp_path, writers=(name,))


def test_an_unknown_writer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected writer .*got 'mlflow'"):
        MetricWriter(tmp_path, writers=("mlflow",))
