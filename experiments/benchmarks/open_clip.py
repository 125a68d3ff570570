"""Benchmark of OpenCLIP's training step, for comparison with `experiments.benchmarks.step`.

    python -m experiments.benchmarks.open_clip --model=ViT-B-32 --batch=1024,4096 --output=runs/benchmark_open_clip

Times forward, loss, backward and AdamW, on random images and texts in device memory. Prints a table and appends JSON
lines to `benchmark_open_clip.jsonl` in the output folder. Needs only `pip install open_clip_torch absl-py`, not JAX.
"""

import contextlib
import dataclasses
import datetime
import functools
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from absl import flags

from experiments import command_line

RECORDS_FILE = "benchmark_open_clip.jsonl"
MODELS = ("ViT-B-32", "ViT-B-16", "ViT-L-14")
PRECISIONS = ("amp_bf16", "bf16", "pure_bf16", "fp32")
OUT_OF_MEMORY = "out of memory"

_IMAGE_SIZE, _CONTEXT, _VOCABULARY = 224, 77, 49408
_RUN_SECONDS = 0.5  # least duration of a timed run, as in experiments.benchmarks.step
_WARM_UP = 3  # untimed steps, for compilation and the optimizer state


@dataclasses.dataclass(frozen=True)
class Settings:
    """Benchmark case of one batch size.

    Attributes:
      model: model name of OpenCLIP.
      batch: pairs of one optimizer step.
      precision: value of OpenCLIP's `--precision`.
      grad_checkpointing: whether the backward pass recomputes the blocks.
      accum_freq: microbatches of a batch. With more than one, all are encoded without gradients first. Each is then
        encoded again with gradients, and its loss uses the features of all.
      compiled: whether to use `torch.compile`.
      repeats: timed runs; the median is reported.
    """

    model: str
    batch: int
    precision: str = "amp_bf16"
    grad_checkpointing: bool = False
    accum_freq: int = 1
    compiled: bool = True
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.batch < 1 or self.batch % self.accum_freq:
            raise ValueError(f"expected --batch to be multiples of --accum_freq={self.accum_freq}, got {self.batch}")


def import_packages() -> tuple[Any, Any]:
    """Import PyTorch and OpenCLIP.

    Returns:
      The modules `torch` and `open_clip`.
    """
    try:
        return importlib.import_module("torch"), importlib.import_module("open_clip")
    except ImportError as error:
        raise ImportError(f"expected PyTorch and OpenCLIP, got: {error}; pip install open_clip_torch") from error


def autocast(precision: str, device: Any) -> Callable[[], Any]:
    """Return the context of a model's forward pass."""
    torch, _ = import_packages()
    if precision == "amp_bf16":
        return functools.partial(torch.autocast, device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext


class Training:
    """Training of an OpenCLIP model on one fixed batch.

    Each call is an optimizer step.
    """

    def __init__(self, settings: Settings) -> None:
        torch, open_clip = import_packages()
        self._torch, self.device = torch, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        precision = settings.precision
        model = open_clip.create_model(settings.model, precision=precision, device=self.device, output_dict=True)
        model.set_grad_checkpointing(settings.grad_checkpointing)
        model.train()
        self._log_scale = model.logit_scale
        self._optimizer = self._adamw(model)
        torch.compiler.reset()  # else a second batch size is compiled with dynamic shapes
        self._model = torch.compile(model) if settings.compiled else model
        self._loss = open_clip.ClipLoss()
        self._autocast = autocast(precision, self.device)
        dtype = open_clip.get_input_dtype(precision) or torch.float32
        shape = (settings.batch, 3, _IMAGE_SIZE, _IMAGE_SIZE)
        images = torch.randn(shape, device=self.device, dtype=dtype)
        texts = torch.randint(_VOCABULARY, (settings.batch, _CONTEXT), device=self.device)
        count = settings.accum_freq
        self._microbatches = list(zip(images.chunk(count), texts.chunk(count), strict=True))

    def __call__(self) -> None:
        """Run one optimizer step."""
        self._optimizer.zero_grad()
        cached = self._encode_without_gradients() if len(self._microbatches) > 1 else []
        for i, (images, texts) in enumerate(self._microbatches):
            with self._autocast():
                output = self._model(images, texts)
                scale = output.pop("logit_scale")
                features = {
                    name: self._torch.cat([*(c[name] for c in cached[:i]), own, *(c[name] for c in cached[i + 1 :])])
                    for name, own in output.items()
                }
                loss = self._loss(**features, logit_scale=scale)
            loss.backward()
        self._optimizer.step()
        with self._torch.no_grad():
            self._log_scale.clamp_(0, math.log(100))

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            self._torch.cuda.synchronize()

    @property
    def device_name(self) -> str:
        """Name of the GPU, or "cpu"."""
        return self._torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"

    @property
    def peak_mib(self) -> float | None:
        """Peak memory of the tensors in MiB; None on the CPU."""
        return self._torch.cuda.max_memory_allocated() / 2**20 if self.device.type == "cuda" else None

    def _encode_without_gradients(self) -> list[dict[str, Any]]:
        """Encode all microbatches without gradients."""
        with self._torch.no_grad(), self._autocast():
            outputs = [self._model(images, texts) for images, texts in self._microbatches]
        return [{name: value for name, value in output.items() if name != "logit_scale"} for output in outputs]

    def _adamw(self, model: Any) -> Any:
        """Create CLIP's AdamW, with weight decay for matrices only."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
        return self._torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6, fused=True)


class Work(Protocol):
    """Work of a device; each call starts it once."""

    def __call__(self) -> Any:
        """Start the work."""

    def wait(self) -> None:
        """Wait for the device."""


def seconds(work: Work, repeats: int, least: float = _RUN_SECONDS) -> float:
    """Measure the median time of a call, in seconds.

    Args:
      work: work to time.
      repeats: number of timed runs.
      least: least duration of a run, in seconds.
    """
    for _ in range(_WARM_UP):
        work()
    calls = math.ceil(least / _elapsed(work, 1))
    return statistics.median(_elapsed(work, calls) for _ in range(repeats)) / calls


def _elapsed(work: Work, calls: int) -> float:
    work.wait()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    work.wait()
    return time.perf_counter() - start


def measure(settings: Settings) -> dict[str, Any]:
    """Measure one batch size.

    Returns:
      The record. If memory runs out, its status is "out of memory" and its figures are None.
    """
    torch, open_clip = import_packages()
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "open_clip": open_clip.__version__,
        **dataclasses.asdict(settings),
        **dict.fromkeys(("device", "step_ms", "images_per_second", "peak_memory_mib")),
        "status": "ok",
    }
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        training = Training(settings)
        record["device"] = training.device_name
        step = seconds(training, settings.repeats)
        record |= {"step_ms": 1e3 * step, "images_per_second": settings.batch / step}
        record["peak_memory_mib"] = training.peak_mib
    except torch.OutOfMemoryError:
        record["status"] = OUT_OF_MEMORY
    return record


# Heading, key of the record, format.
_COLUMNS = (
    ("b", "batch", ",d"),
    ("step ms", "step_ms", ",.2f"),
    ("images/s", "images_per_second", ",.1f"),
    ("peak MiB", "peak_memory_mib", ",.1f"),
    ("status", "status", "s"),
)


def _line(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:>13}" for cell in cells)


def benchmark_from_flags(values: flags.FlagValues) -> None:
    """Run the benchmark with the settings of the flags."""
    if not values.output:
        raise ValueError("expected --output, the folder for the results, got none")
    run(_cases(values), Path(values.output))


def _cases(values: flags.FlagValues) -> list[Settings]:
    names = ("model", "precision", "grad_checkpointing", "accum_freq", "repeats")
    options = {name: values[name].value for name in names}
    return [
        Settings(batch=size, compiled=values.compile, **options)
        for size in command_line.integers("batch", values.batch)
    ]


def run(cases: Sequence[Settings], output: Path) -> None:
    """Measure, print and record all cases."""
    import_packages()
    output.mkdir(parents=True, exist_ok=True)
    print(_line([heading for heading, *_ in _COLUMNS]), flush=True)
    for settings in cases:
        record = measure(settings)
        cells = ["-" if record[key] is None else format(record[key], style) for _, key, style in _COLUMNS]
        print(_line(cells), flush=True)
        with (output / RECORDS_FILE).open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":  # not at import: other commands define flags of the same names
    flags.DEFINE_enum("model", MODELS[0], MODELS, "Model name of OpenCLIP.")
    flags.DEFINE_list("batch", "1024,4096", "Pairs of one optimizer step.")
    flags.DEFINE_enum("precision", PRECISIONS[0], PRECISIONS, "Precision, as OpenCLIP's flag.")
    flags.DEFINE_bool("grad_checkpointing", False, "Recompute the blocks in the backward pass.")
    flags.DEFINE_integer(
        "accum_freq", 1, "Microbatches of the batch; with several, each is encoded twice.", lower_bound=1
    )
    flags.DEFINE_bool("compile", True, "Use torch.compile.")
    flags.DEFINE_integer("repeats", 5, "Timed runs; the median is reported.", lower_bound=1)
    flags.DEFINE_string("output", None, "Folder of the JSON lines.")
    command_line.run(functools.partial(benchmark_from_flags, flags.FLAGS))
