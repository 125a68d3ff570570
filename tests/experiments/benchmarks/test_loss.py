"""The loss benchmark: records, table, plot, float64 reference and number of timed calls."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import properties_ids
import pytest
import runs

from experiments.benchmarks import exact, loss_case, timing
from experiments.benchmarks import loss as benchmark_loss
from experiments.benchmarks.harness import OUT_OF_MEMORY
from experiments.benchmarks.loss import PICTURE_FILE, RECORDS_FILE
from experiments.benchmarks.loss_case import Case, Settings

MODULE = "experiments.benchmarks.loss"
SMALL = Settings(("xla", "dense"), batch=(64, 96), features=(32,), repeats=1, samples=5)
FIGURES = ("forward_ms", "total_ms", "forward_tflops", "tflops", "gemm_fraction", "memory_mib")
ERRORS = {"loss_error": 1e-5, "image_error": 1e-2, "text_error": 1e-2, "scale_error": 1e-4}


@pytest.fixture
def no_timing(monkeypatch):
    """A hundredth of a second for every program."""
    monkeypatch.setattr(timing.Program, "seconds", lambda self, repeats: 0.01)


def read_records(folder):
    return [json.loads(line) for line in (folder / RECORDS_FILE).read_text().splitlines()]


def assert_picture(folder):
    assert (folder / PICTURE_FILE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("devices", [1, 2])
def test_every_case_is_measured_printed_and_recorded(devices, tmp_path, capsys):
    records = benchmark_loss.measure_all(SMALL, oracle.mesh_of(devices), tmp_path / "new" / "folder")
    assert read_records(tmp_path / "new" / "folder") == records
    assert_picture(tmp_path / "new" / "folder")
    cases = [(b, name) for b in SMALL.batch for name in SMALL.implementations]
    assert [(r["batch"], r["implementation"]) for r in records] == cases
    where, headings, *rows = capsys.readouterr().out.splitlines()
    assert re.search(rf"{devices} device\(s\), 1 process.*bfloat16, scale 50; 1024\^3 bf16 GEMM: [\d.]+ TFLOP/s", where)
    assert re.search("implementation +b +D +ids +forward ms +backward ms .*% of GEMM +memory MiB .*status", headings)
    assert [row.split()[:3] for row in rows] == [[name, str(b), "32"] for b, name in cases]
    for record, row in zip(records, rows, strict=True):
        assert len(row) == len(headings) and row.endswith("ok")
        assert f" {record['total_ms']:.3f} " in row
        assert all(record[name] > 0 for name in FIGURES)
        assert all(record[name] <= most for name, most in ERRORS.items())
        same = {"devices": devices, "processes": 1, "platform": "cpu", "jax": jax.__version__, "feature_dim": 32}
        assert record.items() >= (same | {"dtype": "bfloat16", "scale": 50.0, "repeats": 1, "samples": 5}).items()


@pytest.mark.usefixtures("no_timing")
def test_rates_count_what_the_loss_needs_and_are_per_device(tmp_path):
    settings = Settings(("xla",), (64,), (32,), samples=0)
    (record,) = benchmark_loss.measure_all(settings, oracle.mesh_of(2), tmp_path)
    assert record["forward_tflops"] == pytest.approx(2 * 64 * 64 * 32 / 2 / 0.01 / 1e12)
    assert record["tflops"] == pytest.approx(4 * record["forward_tflops"])
    assert record["gemm_fraction"] == pytest.approx(record["tflops"] / record["gemm_tflops"])
    assert record["gemm_tflops"] == pytest.approx(2 * 1024**3 / 0.01 / 1e12)
    assert (record["total_ms"], record["backward_ms"]) == (10.0, 0.0)
    assert all(record[name] is None for name in ERRORS)


def test_a_known_rate():
    flops = loss_case.total_flops(65_536, 512)
    assert flops == 4 * loss_case.forward_flops(65_536, 512)
    assert timing.tflops(flops, 27.6e-3) == pytest.approx(637.4, abs=0.1)
    assert timing.tflops(flops, 27.6e-3, devices=8) == pytest.approx(637.4 / 8, abs=0.1)


@pytest.mark.usefixtures("no_timing")
def test_what_does_not_fit_is_said_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    def clip_loss(image, *args, implementation, **kwargs):
        if implementation == "dense" and len(image) == 96:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
        return benchmark_loss_clip(image, *args, implementation=implementation, **kwargs)

    benchmark_loss_clip = benchmark_loss.clip_loss
    monkeypatch.setattr(benchmark_loss, "clip_loss", clip_loss)
    settings = Settings(("dense", "xla"), (64, 96), (32,))
    records = benchmark_loss.measure_all(settings, oracle.mesh_of(1), tmp_path)
    assert [r["status"] for r in records] == ["ok", "ok", OUT_OF_MEMORY, "ok"]
    assert all(records[2][name] is None for name in (*FIGURES, *ERRORS))
    assert capsys.readouterr().out.splitlines()[4].endswith(OUT_OF_MEMORY)
    benchmark_loss.plot([records[2]], tmp_path / "nothing.png")
    assert_picture(tmp_path)


@pytest.mark.usefixtures("no_timing")
def test_other_errors_are_not_taken_for_missing_memory(tmp_path, monkeypatch):
    def clip_loss(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: a defect")

    monkeypatch.setattr(benchmark_loss, "clip_loss", clip_loss)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a defect"):
        benchmark_loss.measure_all(SMALL, oracle.mesh_of(1), tmp_path)


@pytest.mark.parametrize(("devices", "dtype", "pairs"), [(1, "bfloat16", 2**26), (4, "float32", 3 * 48)])
def test_the_exact_gradients_are_those_of_the_oracle(devices, dtype, pairs, monkeypatch):
    monkeypatch.setattr("experiments.benchmarks.exact._PAIRS", pairs)  # one slice, or three rows at a time
    mesh = oracle.mesh_of(devices)
    case = Case.draw(48, 33, Settings((), (), (), dtype, scale=14.5, samples=7), mesh)
    image, text, scale = case.operands
    assert image.dtype == text.dtype == dtype
    reference = exact.clip(mesh, *case.operands, case.rows)
    loss, (d_image, d_text, d_scale) = oracle.clip(image, text, scale)
    assert len(set(case.rows.tolist())) == 7
    expected = (loss, d_image[case.rows], d_text[case.rows], d_scale)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), tuple(reference)[:4], expected)
    wrong = exact.relative_errors(mesh, (jnp.float32(loss), (1.5 * d_image, d_text, d_scale)), reference, case.rows)
    assert wrong == pytest.approx({"loss": 0, "image": 0.5, "text": 0, "scale": 0}, abs=1e-6)


def test_the_exact_gradients_of_the_sigmoid_loss_are_those_of_the_oracle():
    mesh = oracle.mesh_of(4)
    case = Case.draw(48, 33, Settings((), (), (), "float32", scale=14.5, samples=7, loss="siglip", bias=-9.0), mesh)
    loss, (d_image, d_text, *scalars) = oracle.siglip(*map(np.asarray, case.operands[:2]), 14.5, -9.0)
    expected = (loss, d_image[case.rows], d_text[case.rows], *scalars)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), tuple(case.exact()), expected)


@pytest.mark.usefixtures("no_timing")
def test_the_sigmoid_loss_is_measured(tmp_path):
    settings = Settings(("xla",), (64,), (32,), samples=5, loss="siglip", scale=10.0)
    (record,) = benchmark_loss.measure_all(settings, oracle.mesh_of(1), tmp_path)
    assert record.items() >= {"loss": "siglip", "bias": -10.0, "implementation": "xla"}.items()
    assert all(record[name] <= most for name, most in (ERRORS | {"bias_error": 1e-5}).items())


DISTILLED = Settings(("xla",), (48,), (33,), "float32", 14.5, samples=7, loss="distillation", teacher_features=20)


def test_the_exact_gradients_of_the_distillation_loss_are_those_of_the_oracle():
    case = Case.draw(48, 33, DISTILLED, oracle.mesh_of(2))
    student, teacher = ([np.asarray(a) for a in f[:2]] for f in (case.operands, case.teacher))
    _, loss, (d_image, d_text, d_scale), _ = oracle.distillation(student, teacher, 14.5, 50.0)
    expected = (loss, d_image[case.rows], d_text[case.rows], d_scale)
    found = tuple(case.exact())[:4]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-14), found, expected)


@pytest.mark.usefixtures("no_timing")
def test_the_distillation_loss_is_measured(tmp_path):
    (record,) = benchmark_loss.measure_all(DISTILLED, oracle.mesh_of(1), tmp_path)
    assert record.items() >= {"loss": "distillation", "teacher_features": 20, "teacher_scale": 50.0}.items()
    assert record["tflops"] == pytest.approx((8 * 33 + 4 * 20) * 48 * 48 / 0.01 / 1e12)
    assert all(record[name] <= most for name, most in ERRORS.items())


@pytest.mark.parametrize(("kind", "multi_positive"), [("unique", "mean"), ("1%", "any"), ("8", "mean"), ("8", "any")])
def test_the_exact_gradients_by_id_are_those_of_the_oracle(kind, multi_positive):
    mesh = oracle.mesh_of(2)
    settings = Settings((), (), (), "float32", scale=14.5, samples=7, multi_positive=multi_positive)
    case = Case.draw(120, 33, settings, mesh, kind)
    image, text, ids = (np.asarray(a) for a in (*case.operands[:2], case.ids))
    assert len(np.unique(ids)) == {"unique": 120, "1%": 119, "8": 15}[kind]
    kept, ones = np.ones((120, 120), bool), np.ones(120)
    want, _ = properties_ids.expected(image, text, 14.5, (ids, ids), kept, (1, 0), ones, multi_positive, 0.0)
    want = (want[0], want[1][case.rows], want[2][case.rows], want[3])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-14), tuple(case.exact())[:4], want)


def test_features_are_unit_vectors_with_pairs_of_every_angle():
    image, text, _ = Case.draw(256, 64, Settings((), (), (), "float32"), oracle.mesh_of(2)).operands
    np.testing.assert_allclose(np.linalg.norm(image, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(text, axis=1), 1, rtol=1e-5)
    cosines = np.sum(np.asarray(image) * np.asarray(text), axis=1)
    assert cosines.min() < 0.2 and cosines.max() > 0.9 and 0.4 < cosines.mean() < 0.6


COMMAND = ("--implementations=xla", "--batch=64", "--features=32", "--repeats=1")
MISTAKES = {
    "no output": ((), "expected --output"),
    "another loss": (("--output={tmp}", "--loss=siglip", "--implementations=dense"), "among ring, .*dense"),
    "ids with a teacher": (("--output={tmp}", "--loss=distillation", "--ids=8"), "--ids=none with --loss=distillation"),
    "no number": (("--output={tmp}", "--batch=64,many"), "--batch to be positive integers .*'64,many'"),
    "uneven batch": (("--output={tmp}", "--batch=64,65", "--devices=2"), "multiples of the 2 devices, got 65"),
    "misspelt flag": (("--output={tmp}", "--bacth=64"), "bacth"),
    "output below a file": (("--output={tmp}/file/new",), "file/new"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line(mistake, tmp_path):
    (tmp_path / "file").write_text("")
    arguments, message = MISTAKES[mistake]
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    status, _, stderr = runs.command(MODULE, *COMMAND, *arguments, cpu_devices=2)
    assert status == 1
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", stderr), stderr


def test_the_command_over_two_processes(tmp_path):
    arguments = [*COMMAND, f"--output={tmp_path}"]
    finished = runs.finish(*runs.start_cluster(2, MODULE, *arguments))
    assert [process.returncode for process in finished] == [0, 0], finished
    printed = [[line for line in p.stdout.splitlines() if not line.startswith("[Gloo]")] for p in finished]
    assert [len(lines) for lines in printed] == [3, 0]
    (record,) = read_records(tmp_path)
    assert (record["devices"], record["processes"], record["status"]) == (2, 2, "ok")
    assert all(record[name] <= most for name, most in ERRORS.items())
    assert_picture(tmp_path)


def test_needs_no_package_of_the_data_pipeline(tmp_path):
    missing = ("ml_collections", "grain", "tensorflow_datasets")
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{blocked}")
    _, stderr = runs.start(MODULE, PYTHONPATH=str(tmp_path)).communicate(timeout=120)
    assert stderr.startswith("error: expected --output"), stderr
