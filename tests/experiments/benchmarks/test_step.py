"""The step benchmark: FLOPs, timed calls, records, table, plot and errors."""

import contextlib
import dataclasses
import io
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runs
from absl import flags
from absl.testing import flagsaver

from experiments.benchmarks import photographs, step_case, timing
from experiments.benchmarks import step as benchmark_step
from experiments.benchmarks.harness import OUT_OF_MEMORY
from experiments.benchmarks.step import PICTURE_FILE, RECORDS_FILE
from experiments.benchmarks.step_case import Settings
from experiments.benchmarks.step_pairs import RandomReader
from infcl_jax import siglip_loss
from infcl_jax.data.parallelism import STAGES
from infcl_jax.models import model_config
from infcl_jax.models.flops import forward_flops
from infcl_jax.training import GradCacheConfig
from infcl_jax.training.step import NO_CACHE

MODULE = "experiments.benchmarks.step"
B = 16
CALL_SECONDS = 0.01
TIMED = ("gemm", "step", "encode", "loss", "backward", "update", "data")  # in this order
PARTS = ("encode_ms", "loss_ms", "backward_ms", "update_ms", "data_ms")
RATES = ("step_ms", "images_per_second", "images_per_second_per_device", "tflops", "gemm_fraction")
# Devices, gradient caching, loss, MiB in use at most before and after the step.
WAYS = {
    "at once": (1, NO_CACHE, {}, (1, 3)),
    "in chunks from the host": (2, GradCacheConfig(chunk_size=8, offload="host"), {"loss": "fastclip_v3"}, (3, 3)),
    "ids, a prefix, a teacher": (1, NO_CACHE, {"ids": "8", "matryoshka": (8,), "teacher_features": 24}, (1, 3)),
}


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    """Instead of fast programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def settings(*batch, cache=NO_CACHE, **changes):
    return Settings("tiny", batch, runs.OVERRIDES, cache, repeats=3, **changes)


@contextlib.contextmanager
def no_timing(fail_at=None):
    """Replace timing: call everything twice, as donated state requires, and report 10 ms.

    Yields what the second calls returned, on the host. Memory runs out at the program of that name.
    """
    results = {}

    def seconds(call, repeats, least=0.0):
        if (name := TIMED[len(results)]) == fail_at:
            results[name] = None
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
        results[name] = jax.device_get([call(), call()][1])
        return CALL_SECONDS

    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # for optax
        patch.setattr(timing, "seconds", seconds)
        yield results


@dataclasses.dataclass(frozen=True)
class Measured:
    devices: int
    cache: GradCacheConfig
    folder: str
    record: dict
    results: dict
    printed: list


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One batch size, trained on in every way."""

    def measure(devices, cache, changes, peaks):
        folder, printed = tmp_path_factory.mktemp("output") / "new" / "folder", io.StringIO()
        left = (2**20 * peak for peak in peaks)
        with no_timing() as results, contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_case, "peak_bytes", lambda mesh: next(left))
            (record,) = benchmark_step.measure_all(settings(B, cache=cache, **changes), oracle.mesh_of(devices), folder)
        return Measured(devices, cache, folder, record, results, printed.getvalue().splitlines())

    return {way: measure(*how) for way, how in WAYS.items()}


def read_records(folder):
    return [json.loads(line) for line in (folder / RECORDS_FILE).read_text().splitlines()]


def assert_picture(folder):
    assert (folder / PICTURE_FILE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("way", list(WAYS))
def test_a_case_is_printed_recorded_and_drawn(way, measured):
    case = measured[way]
    assert read_records(case.folder) == [case.record]
    assert_picture(case.folder)
    where, headings, row = case.printed
    assert re.search(rf"{case.devices} device\(s\), 1 process.*tiny.*GFLOP a pair; 1024\^3 bf16 GEMM: ", where)
    assert re.search(
        "b +step ms +images/s +images/s/device .*encode ms +loss ms +backward ms +update ms +data ms", headings
    )
    assert len(row) == len(headings) and row.split()[:2] == [str(B), "10.00"] and row.endswith("ok")


@pytest.mark.parametrize("way", list(WAYS))
def test_the_figures_of_a_record_agree(way, measured):
    case, flops = measured[way], 3 * forward_flops(model_config("tiny", **runs.MODEL))
    same = {"batch": B, "devices": case.devices, "processes": 1, "platform": "cpu", "jax": jax.__version__}
    same |= {"model": "tiny", "model_overrides": runs.OVERRIDES, "implementation": None, "repeats": 3, "status": "ok"}
    same |= dataclasses.asdict(case.cache) | {"flops_per_pair": flops}
    record = case.record
    assert record.items() >= same.items()
    assert record["step_ms"] == pytest.approx(1e3 * CALL_SECONDS)
    assert record["images_per_second"] == pytest.approx(B / CALL_SECONDS)
    assert record["images_per_second_per_device"] == pytest.approx(B / CALL_SECONDS / case.devices)
    assert record["tflops"] == pytest.approx(B * flops / CALL_SECONDS / case.devices / 1e12)
    assert record["gemm_fraction"] == pytest.approx(record["tflops"] / record["gemm_tflops"])
    assert [record[name] for name in PARTS] == pytest.approx([10, 10, 0, 10, 0])  # two are differences
    from_host = case.cache.offload == "host"
    assert record["peak_memory_mib"] == (None if from_host else 3)  # the higher peak before is not this case's
    if from_host:
        assert record["memory_mib"] is None  # of many programs, none needs what the step needs
    else:
        state, _ = case.results["step"]
        in_use = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
        assert 1 < record["memory_mib"] * 2**20 / in_use < 100


@pytest.mark.parametrize("way", list(WAYS))
def test_what_is_timed_is_what_is_said(way, measured):
    results = measured[way].results
    assert tuple(results) == TIMED
    state, metrics = results["step"]
    (_, features), (image, text) = results["encode"], [results["encode"][1][name] for name in ("image", "text")]
    assert image.shape == text.shape == (B, runs.MODEL["embed_dim"])
    np.testing.assert_allclose(np.linalg.norm(image, axis=1), 1, rtol=1e-4)
    loss, gradients = results["loss"]
    np.testing.assert_allclose(loss, metrics["loss"], rtol=0.1)  # of parameters one step younger
    assert [g.shape for g in gradients] == [image.shape, text.shape, ()]
    (total, again), gradients = results["backward"]
    np.testing.assert_allclose(total, image.sum() + text.sum(), rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), again, features)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, state.params)
    assert np.any(gradients["visual"]["proj"]["kernel"]) and np.any(gradients["text"]["text_projection"]["kernel"])
    steps = [results[name][0].step for name in ("step", "update", "data")]
    assert steps == [2, 4, 6]  # one run from beginning to end


def test_the_step_can_be_timed_alone(tmp_path):
    with no_timing() as results:
        (record,) = benchmark_step.measure_all(settings(B, phases=False), oracle.mesh_of(1), tmp_path)
    assert tuple(results) == TIMED[:2] and record["status"] == "ok" and record["step_ms"] > 0
    assert all(record[name] is None for name in PARTS)


@pytest.mark.parametrize("source", ["laion", "file"])
def test_packed_captions_train_like_padded_ones(tmp_path, source):
    (tmp_path / "lengths.txt").write_text("5\n8\n30\n")
    lengths, losses = {"laion": "laion", "file": str(tmp_path / "lengths.txt")}[source], []
    for packing, cache in (
        ("off", NO_CACHE),
        ("auto", NO_CACHE),
        ("auto", GradCacheConfig(chunk_size=8, offload="host")),
    ):
        given = settings(B, cache=cache, caption_lengths=lengths, text_packing=packing, phases=False)
        with no_timing() as results:
            benchmark_step.measure_all(given, oracle.mesh_of(2), tmp_path)
        losses.append(results["step"][1]["loss"])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_a_batch_can_be_read_twice(tmp_path):
    cache = GradCacheConfig(chunk_size=8, offload="replay")
    with no_timing() as results:
        (record,) = benchmark_step.measure_all(settings(B, cache=cache), oracle.mesh_of(2), tmp_path)
    assert tuple(results) == TIMED[:-1] and record["status"] == "ok" and record["data_ms"] is None
    again, features = results["backward"][0][1], results["encode"][1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), again, features)
    assert len(np.unique(features["text"], axis=0)) == B  # so no two pairs are the same


@pytest.mark.parametrize(
    ("loss", "cache"),
    [
        ("fastclip_v3", GradCacheConfig(chunk_size=8, offload="host")),
        ("clip", GradCacheConfig(chunk_size=8, offload="replay")),
    ],
)
def test_files_feed_the_step(tmp_path, capsys, loss, cache):
    dataset = photographs.write("tar", tmp_path / "tar", photographs.samples(2 * B, (24, 16)), shards=2)
    fed = settings(B, loss=loss, cache=cache, phases=False, data=dataset)
    with no_timing():
        (record,) = benchmark_step.measure_all(fed, oracle.mesh_of(2), tmp_path)
    assert record["status"] == "ok" and record["data"] == dataset
    assert record["files_images_per_second"] == pytest.approx(B / CALL_SECONDS) and record["files_fraction"] == 1
    assert record["files_wait"] is None if cache.offload == "replay" else 0 <= record["files_wait"] <= 1
    assert record["files_stage"] in STAGES and record["files_readers"].endswith(" ahead")
    assert capsys.readouterr().out.splitlines()[-1].endswith(record["files_readers"])


@pytest.mark.parametrize("spans", [[slice(0, 3), slice(10, 13)], [slice(7, 10), slice(17, 20)], [slice(9, 10)]])
def test_random_rows_are_the_same_whenever_read(spans):
    reader = RandomReader(model_config("tiny", **runs.MODEL), 20, oracle.mesh_of(2), 6)
    once, twice = reader.read(spans), reader.read(spans)
    shapes = {"image": (runs.SIDE, runs.SIDE, 3), "text": (runs.CONTEXT,)}
    for name, shape in shapes.items():
        assert once[name].shape == (sum(span.stop - span.start for span in spans), *shape)
        np.testing.assert_array_equal(once[name], twice[name])


@pytest.mark.parametrize("bias", [-10.0, None])
def test_siglip_is_timed_with_the_bias_of_the_model(bias):
    siglip = settings(B, loss="siglip")
    siglip = dataclasses.replace(siglip, model_overrides=f"{siglip.model_overrides},init_logit_bias={bias}")
    case = step_case.Case.create(siglip, oracle.mesh_of(1), B)
    training = types.SimpleNamespace(state=types.SimpleNamespace(samples=None, step=0), batch={})
    features = dict(zip(("image", "text"), oracle.features("random", B, B, 16), strict=True))
    with contextlib.nullcontext() if bias else pytest.raises(ValueError, match="expected a model with a logit bias"):
        value, _ = case._loss_program(training, features)()
        assert value == pytest.approx(float(siglip_loss(*features.values(), 1 / 0.07, bias)), rel=1e-5)


@pytest.mark.parametrize("program", ["encode", "data"])
def test_where_memory_runs_out_the_rest_goes_on(program, tmp_path, monkeypatch):
    def draw_pairs(config, rows, lengths):
        if rows == 2 * B:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
        return drawn(config, rows, lengths)

    drawn = step_case.draw_pairs
    monkeypatch.setattr(step_case, "draw_pairs", draw_pairs)
    with no_timing(fail_at=program):
        first, second, third = benchmark_step.measure_all(settings(2 * B, B, 2 * B), oracle.mesh_of(1), tmp_path)
    for record in (first, third):
        assert record["status"] == OUT_OF_MEMORY
        assert all(record[name] is None for name in (*RATES, *PARTS, "memory_mib"))
    assert all(second[name] > 0 for name in (*RATES, "memory_mib")) and second["data_ms"] is None
    known = program == "data"  # a comparison that does not fit says nothing about the step
    assert (second["status"] == "ok") == known and (second["encode_ms"] is not None) == known
    assert_picture(tmp_path)


MISTAKES = {
    "no output": ((), "expected --output"),
    "unknown override": (("--output={tmp}", "--model_overrides=depth=3"), "model overrides among .* got 'depth'"),
    "override of another form": (("--output={tmp}", "--model_overrides=depth"), "expected model_overrides like"),
    "uneven chunks": (
        ("--output={tmp}", "--chunk_size=7", "--devices=2"),
        "grad_cache.chunk_size to be a multiple of the 2 devices, got 7",
    ),
    "too many devices": (("--output={tmp}", "--devices=9"), "--devices from 1 to 8.* got 9"),
    "read twice with a memory": (
        ("--output={tmp}", "--offload=replay", "--chunk_size=8", "--loss=fastclip_v3"),
        "expected offload 'none' or 'host' with fastclip_v3, got 'replay'",
    ),
    "no files": (("--output={tmp}", "--data=/nowhere/{{00000..00001}}.tar"), "/nowhere/00000.tar"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line_before_anything_is_timed(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "seconds", lambda *_: pytest.fail("something was timed"))
    arguments, message = MISTAKES[mistake]
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    with flagsaver.flagsaver(), pytest.raises((ValueError, OSError, flags.Error), match=message) as raised:
        flags.FLAGS([MODULE, "--batch=64", *arguments])
        benchmark_step.benchmark_from_flags()
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_the_command_over_two_processes(tmp_path):
    arguments = [
        f"--batch={B}",
        "--chunk_size=8",
        "--keep=1",
        "--keep_residual",
        "--repeats=1",
        "--nophases",
        f"--output={tmp_path}",
    ]
    arguments += ["--model=tiny", f"--model_overrides={runs.OVERRIDES}"]
    finished = runs.finish(*runs.start_cluster(2, MODULE, *arguments))
    assert [process.returncode for process in finished] == [0, 0], finished
    printed = [[line for line in p.stdout.splitlines() if not line.startswith("[Gloo]")] for p in finished]
    assert [len(lines) for lines in printed] == [3, 0]
    (record,) = read_records(tmp_path)
    assert (record["devices"], record["processes"], record["status"]) == (2, 2, "ok")
    assert all(record[name] > 0 for name in (*RATES, "memory_mib"))
    assert_picture(tmp_path)
