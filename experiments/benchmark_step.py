r"""Times a whole training step, with its parts, its memory and its use of the device.

    python -m experiments.benchmark_step --model=ViT-B/32 --model_overrides=dtype=bfloat16 --batch=1024,4096 \
        --output=runs/benchmark_step [--chunk_size=1024 --residency=host] [--loss=fastclip_v3]

Prints a table, adds JSON lines to `benchmark_step.jsonl` and draws `benchmark_step.png` in the output folder;
docs/benchmarks.md says what the figures mean. On several hosts, or with one process for each GPU: the same command in
every process, see `infcl_jax.distributed.initialize`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure

from configs import base
from experiments import benchmark
from experiments.benchmark import Product, Program
from experiments.flops import step_flops
from experiments.overrides import parse_overrides
from infcl_jax import create_samples
from infcl_jax.distributed import DATA_AXIS, is_lead, replicate, shard_batch
from infcl_jax.grad_cache import RESIDENCIES, cached_value_and_grad
from infcl_jax.losses.global_contrastive import VARIANTS
from infcl_jax.models import CLIPConfig, CLIPOutput, build_model, model_config, model_names
from infcl_jax.planner import compiled_bytes
from infcl_jax.training import (
    GlobalContrastive,
    GlobalContrastiveConfig,
    GradCacheConfig,
    OptimizerConfig,
    TrainState,
    create_state,
    make_loss,
    make_optimizer,
    make_train_step,
)
from infcl_jax.training.sharding import PARAMETER_SHARDINGS
from infcl_jax.training.step import NO_CACHE, LossFn, TrainStep, evaluate_loss, memory_of

RECORDS_FILE = "benchmark_step.jsonl"
PICTURE_FILE = "benchmark_step.png"

_MODEL = flags.DEFINE_string("model", "ViT-B/32", f"One of {', '.join(model_names())}.")
_OVERRIDES = flags.DEFINE_string("model_overrides", "", "Changes to it, such as dtype=bfloat16,vision.remat=dots.")
_CHUNK_SIZE = flags.DEFINE_integer("chunk_size", None, "Pairs encoded at a time; without: no caching.", lower_bound=1)
_KEEP = flags.DEFINE_integer("keep", 0, "Chunks whose activations are kept.", lower_bound=0)
_RESIDENCY = flags.DEFINE_enum("residency", "device", RESIDENCIES, "Where the batch lives.")
_SHARDING = flags.DEFINE_enum("parameter_sharding", "replicated", PARAMETER_SHARDINGS, "Of the state.")
_LOSS = flags.DEFINE_enum("loss", "clip", ("clip", *VARIANTS), "To train with.")
_PARTS = flags.DEFINE_bool("parts", True, "Also time the parts of the step and waiting for data.")
_IMPLEMENTATION = flags.DEFINE_string("implementation", None, "Of the loss; the best here by default.")

_SEED = 0
# Starting a step takes 1 to 3 ms.
_STEP_SECONDS = 0.5
# Samples of the dataset that a global contrastive loss remembers: those of CC3M.
_SAMPLES = 2_700_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure: one way of training one model at every batch size.

    Attributes:
      model: a name of `infcl_jax.models.model_names()`.
      batch: global batch sizes b, multiples of the device count.
      model_overrides: changes to the model.
      cache: gradient caching, with the batch on the devices or on the host.
      implementation: of the loss, see `infcl_jax.pairwise_lse`.
      parameter_sharding: "replicated" or "fsdp", see `infcl_jax.training.create_state`.
      loss: "clip" or a global contrastive loss.
      parts: whether the parts of the step are timed too.
      repeats: timed runs of each program, of which the median counts.
    """

    model: str
    batch: tuple[int, ...]
    model_overrides: str = ""
    cache: GradCacheConfig = NO_CACHE
    implementation: str | None = None
    parameter_sharding: str = "replicated"
    loss: str = "clip"
    parts: bool = True
    repeats: int = 5

    @functools.cached_property
    def model_config(self) -> CLIPConfig:
        """The model with its overrides; a `ValueError` says what is wrong with them."""
        return model_config(self.model, **parse_overrides(self.model_overrides))


def benchmark_from_flags() -> None:
    """Measures what the flags ask for.

    Raises:
      ValueError: a flag is wrong or missing, or does not suit the devices.
    """
    settings = Settings(
        model=_MODEL.value,
        batch=benchmark.batch_sizes(),
        model_overrides=_OVERRIDES.value,
        cache=GradCacheConfig(chunk_size=_CHUNK_SIZE.value, keep=_KEEP.value, residency=_RESIDENCY.value),
        implementation=_IMPLEMENTATION.value,
        parameter_sharding=_SHARDING.value,
        loss=_LOSS.value,
        parts=_PARTS.value,
        repeats=benchmark.REPEATS.value,
    )
    output = benchmark.output_folder()
    mesh = benchmark.start_devices(benchmark.DEVICES.value)
    benchmark.check_even("batch", settings.batch, mesh)
    benchmark.check_even("chunk_size", [settings.cache.chunk_size or 0], mesh)
    measure_all(settings, mesh, output)


def measure_all(settings: Settings, mesh: Mesh, output: Path) -> list[dict[str, Any]]:
    """Measures one batch size after the other, prints and records each, and draws them all.

    Args:
      settings: what to measure.
      mesh: the devices.
      output: folder of the JSON lines, which are added to, and of the picture, which is replaced.

    Returns:
      The new records, see docs/benchmarks.md. What does not fit into memory has the status "out of memory" and None
      for the figures that could not be had.

    Raises:
      ValueError: there is no such model, override or implementation.
    """
    flops = step_flops(settings.model_config)
    about = f"{_title(settings)}, {flops / 1e9:.3g} GFLOP a pair"
    product = benchmark.start_table(about, _COLUMNS, mesh, settings.repeats, output)
    records = []
    for b in settings.batch:
        record = benchmark.circumstances(mesh) | {"batch": b, "flops_per_pair": flops}
        record |= {
            name: value for name, value in dataclasses.asdict(settings).items() if name not in ("batch", "cache")
        }
        record |= dataclasses.asdict(settings.cache)
        record |= {f"product_{name}": value for name, value in product._asdict().items()}
        record |= benchmark.collect(_FIGURES, _Case(settings, mesh, b).figures(product))
        benchmark.append_record(output / RECORDS_FILE, record)
        benchmark.say(benchmark.row(_COLUMNS, record))
        records.append(record)
    if is_lead():
        draw(records, f"{records[0]['device']}, {mesh.size} device(s), {_title(settings)}", output / PICTURE_FILE)
    return records


def _title(settings: Settings) -> str:
    cache = settings.cache
    caching = f"chunks of {cache.chunk_size}, {cache.keep} kept, batch on the {cache.residency}"
    parts = (
        settings.model,
        settings.model_overrides,
        settings.loss,
        caching if cache.chunk_size else "no gradient caching",
    )
    return ", ".join(filter(None, parts))


_FIGURES = (
    *("step_ms", "images_per_second", "images_per_second_per_device", "tflops", "of_product"),
    *("encode_ms", "loss_ms", "backward_ms", "update_ms", "data_ms", "memory_mib", "peak_memory_mib"),
)


@dataclasses.dataclass
class _Training:
    """A state and the step that replaces it; every call is one more."""

    step: TrainStep
    state: TrainState
    batch: Any

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return self.state, metrics


@dataclasses.dataclass
class _FedTraining(_Training):
    """Training whose batch comes from host memory for each step, one step ahead, as in `experiments.train`."""

    mesh: Mesh
    metrics: Any = None

    def __call__(self) -> Any:
        batch, before = shard_batch(self.mesh, self.batch), self.metrics
        self.state, self.metrics = self.step(self.state, batch)
        jax.block_until_ready(before)  # no more than two batches on the devices
        return self.state, self.metrics


@dataclasses.dataclass(frozen=True)
class _Case:
    """One batch size and what is measured of it."""

    settings: Settings
    mesh: Mesh
    b: int

    @functools.cached_property
    def loss_fn(self) -> LossFn | GlobalContrastive:
        """The loss of the run."""
        name, implementation = self.settings.loss, self.settings.implementation
        if name == "clip":
            return make_loss(name, self.mesh, implementation)
        steps = max(1, _SAMPLES // self.b)
        return GlobalContrastive(
            variant=name,
            config=GlobalContrastiveConfig(),
            steps_per_epoch=steps,
            mesh=self.mesh,
            implementation=implementation,
        )

    def figures(self, product: Product) -> Iterator[dict[str, float]]:
        """Figure after figure, so that those before memory runs out are known."""
        config, cache, repeats = self.settings.model_config, self.settings.cache, self.settings.repeats
        pairs = draw_pairs(config, self.b * len(self.mesh.local_devices) // self.mesh.size)
        if isinstance(self.loss_fn, GlobalContrastive):
            pairs["index"] = np.arange(len(pairs["text"]), dtype=np.int32) + jax.process_index() * len(pairs["text"])
        batch = shard_batch(self.mesh, pairs) if cache.residency == "device" else pairs
        state, step = self.initial_state(), self.train_step(cache)
        if cache.residency == "device":
            step = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
            yield {"memory_mib": compiled_bytes(step) / 2**20}
        before = peak_bytes(self.mesh)
        train = _Training(step, state, batch)
        seconds = benchmark.seconds(train, repeats, _STEP_SECONDS)
        rate = benchmark.tflops(step_flops(config) * self.b, seconds, self.mesh.size)
        yield {"step_ms": 1e3 * seconds, "tflops": rate, "of_product": rate / product.tflops}
        images = self.b / seconds
        yield {"images_per_second": images, "images_per_second_per_device": images / self.mesh.size}
        if (peak := peak_bytes(self.mesh)) > before:
            yield {"peak_memory_mib": peak / 2**20}
        if not self.settings.parts:
            return
        yield from self.parts(train)
        try:
            yield {"data_ms": 1e3 * self.waiting_for_data(train, pairs, seconds)}
        except jax.errors.JaxRuntimeError as error:  # the step itself fits
            if not benchmark.is_out_of_memory(error):
                raise

    def initial_state(self) -> TrainState:
        """Fresh parameters, and the optimizer of `configs/base.py`."""
        config, run = self.settings.model_config, base.get_config()
        optimizer = make_optimizer(OptimizerConfig(**run.optimizer), run.total_steps)
        sizes = config.vision.image_size, config.text.context_length
        sharding = self.settings.parameter_sharding
        state = create_state(build_model(config), optimizer, *sizes, _SEED, self.mesh, sharding)
        if not isinstance(self.loss_fn, GlobalContrastive):
            return state
        own = VARIANTS[self.settings.loss].temperature == "samples"
        return state.replace(samples=create_samples(_SAMPLES, temperature=0.07 if own else None, mesh=self.mesh))

    def train_step(self, cache: GradCacheConfig) -> TrainStep:
        """The step as `experiments.train` makes it, with this gradient caching."""
        return make_train_step(self.loss_fn, _SEED, cache, self.mesh, self.settings.parameter_sharding)

    def parts(self, train: _Training) -> Iterator[dict[str, float]]:
        """Times of the parts, each compiled for itself on the shapes of the step."""
        repeats = self.settings.repeats
        key = jax.jit(lambda step: jax.random.fold_in(jax.random.key(_SEED), step))(train.state.step)
        args = train.state.params, train.batch, key
        encode = functools.partial(self.passes(backward=False), *args)
        encode_seconds = benchmark.seconds(encode, repeats)
        yield {"encode_ms": 1e3 * encode_seconds}
        _, features = encode()
        yield {"loss_ms": 1e3 * self.loss_program(train, features).seconds(repeats)}
        del features
        both = functools.partial(self.passes(backward=True), *args)
        yield {"backward_ms": 1e3 * (benchmark.seconds(both, repeats) - encode_seconds)}
        _, grads = both()
        update = jax.jit(lambda state, grads: (state.apply_gradients(grads=grads), None), donate_argnums=0)
        updating = _Training(update, train.state, grads)
        yield {"update_ms": 1e3 * benchmark.seconds(updating, repeats)}
        train.state = updating.state

    def passes(self, *, backward: bool) -> Callable[..., Any]:
        """Encodes a batch as the step does, and with `backward` pulls a gradient of all features back as the step does.

        Returns:
          `(params, batch, key) -> ((sum of the features, features), gradients)`, without `backward` only the first.
        """
        model, cache, names = build_model(self.settings.model_config), self.settings.cache, ("image", "text")

        def encoder(name: str) -> Callable[..., Any]:
            def encode(params: Any, chunk: Any, key: jax.Array) -> Any:
                rngs = {"dropout": key}
                return model.apply({"params": params}, chunk, train=True, method=f"encode_{name}", rngs=rngs)

            return encode

        def total(params: Any, features: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
            return jnp.sum(features["image"] + features["text"], dtype=jnp.float32), features

        function = cached_value_and_grad(
            {name: encoder(name) for name in names},
            total,
            chunk_size=cache.chunk_size or self.b,
            keep=cache.keep if cache.chunk_size else 1,  # without caching: one chunk, encoded once
            frozen=() if backward else names,
            has_aux=True,
            residency=cache.residency,
            sharding=NamedSharding(self.mesh, PartitionSpec(DATA_AXIS)) if self.mesh.size > 1 else None,
        )
        run = function if backward else lambda *args: function(*args)[0]
        return jax.jit(run) if cache.residency == "device" else run

    def loss_program(self, train: _Training, features: dict[str, jax.Array]) -> Program:
        """The loss with its gradients over features and scale."""

        def loss(image: jax.Array, text: jax.Array, scale: jax.Array, memory: dict[str, Any]) -> jax.Array:
            return evaluate_loss(self.loss_fn, CLIPOutput(image, text, scale, None), memory)[0]

        scale = replicate(self.mesh, np.float32(1 / 0.07))
        memory = memory_of(self.loss_fn, train.state, train.batch)
        return Program(jax.value_and_grad(loss, argnums=(0, 1, 2)), features["image"], features["text"], scale, memory)

    def waiting_for_data(self, train: _Training, pairs: Any, seconds: float) -> float:
        """How much longer a step takes if its batch comes from host memory than if it is on the devices already."""
        cache, repeats = self.settings.cache, self.settings.repeats
        if cache.residency == "device":
            fed = _FedTraining(train.step, train.state, pairs, self.mesh)
            return benchmark.seconds(fed, repeats, _STEP_SECONDS) - seconds
        on_devices = dataclasses.replace(cache, residency="device")
        resident = _Training(self.train_step(on_devices), train.state, shard_batch(self.mesh, pairs))
        return seconds - benchmark.seconds(resident, repeats, _STEP_SECONDS)


def draw_pairs(config: CLIPConfig, rows: int) -> dict[str, np.ndarray]:
    """Random images, uint8 `[rows, size, size, 3]`, and token ids, int32 `[rows, context_length]`, of a process."""
    rng = np.random.default_rng(jax.process_index())
    size, text = config.vision.image_size, config.text
    return {
        "image": rng.integers(0, 256, (rows, size, size, 3), dtype=np.uint8),
        "text": rng.integers(0, text.vocab_size, (rows, text.context_length), dtype=np.int32),
    }


def peak_bytes(mesh: Mesh) -> int:
    """The most bytes that a device of this process has had in use so far; 0 where devices do not say."""
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in mesh.local_devices)


_COLUMNS = (
    ("b", "batch", ",d"),
    ("step ms", "step_ms", ",.2f"),
    ("images/s", "images_per_second", ",.1f"),
    ("a device", "images_per_second_per_device", ",.1f"),
    ("TFLOP/s", "tflops", ".3g"),
    ("of product", "of_product", ".1%"),
    ("encode ms", "encode_ms", ",.2f"),
    ("loss ms", "loss_ms", ",.2f"),
    ("backward ms", "backward_ms", ",.2f"),
    ("update ms", "update_ms", ",.2f"),
    ("data ms", "data_ms", ",.2f"),
    ("memory MiB", "memory_mib", ",.1f"),
    ("peak MiB", "peak_memory_mib", ",.1f"),
    ("status", "status", "s"),
)


def draw(records: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draws images per second and memory over the batch size."""
    figure = Figure(figsize=(12, 4.5), dpi=100, layout="constrained")
    figure.suptitle(title)
    panels = {
        "images/s": {"images_per_second": "all devices"},
        "memory of a device, MiB": {"memory_mib": "planned", "peak_memory_mib": "peak in use"},
    }
    for axes, (label, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for key, name in lines.items():
            line = sorted((r["batch"], r[key]) for r in records if r[key])
            axes.plot([b for b, _ in line], [value for _, value in line], marker="o", markersize=3, label=name)
        benchmark.over_batches(axes, records, label)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    benchmark.run(benchmark_from_flags)
