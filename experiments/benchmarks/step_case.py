"""What `experiments.benchmarks.step` measures of one batch size: the step, its parts, waiting for data, and memory."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import base
from experiments.benchmarks import harness
from experiments.benchmarks.flops import step_flops
from experiments.benchmarks.harness import Product, Program
from infcl_jax.distributed import DATA_AXIS, replicate, shard_batch
from infcl_jax.grad_cache import cached_value_and_grad
from infcl_jax.models import CLIPConfig, CLIPOutput, build_model, model_config
from infcl_jax.planner import compiled_bytes
from infcl_jax.settings import parse_overrides
from infcl_jax.training import (
    GlobalContrastive,
    GlobalContrastiveConfig,
    GradCacheConfig,
    OptimizerConfig,
    TrainState,
    create_state,
    initial_samples,
    make_loss,
    make_optimizer,
    make_train_step,
    replayed,
)
from infcl_jax.training.step import NO_CACHE, LossFn, TrainStep, evaluate_loss, memory_of

_SEED = 0
# Starting a step takes 1 to 3 ms.
_STEP_SECONDS = 0.5
# Images that a batch which lives nowhere is made of, in chunks.
_POOL_CHUNKS = 2
# Samples of the dataset that a global contrastive loss remembers: those of CC3M.
_SAMPLES = 2_700_000

# Keys of a record that `Case.figures` may give.
FIGURES = (
    *("step_ms", "images_per_second", "images_per_second_per_device", "tflops", "of_product"),
    *("encode_ms", "loss_ms", "backward_ms", "update_ms", "data_ms", "memory_mib", "peak_memory_mib"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure: one way of training one model at every batch size.

    Attributes:
      model: a name of `infcl_jax.models.model_names()`.
      batch: global batch sizes b, multiples of the device count.
      model_overrides: changes to the model.
      cache: gradient caching.
      implementation: of the loss, see `infcl_jax.pairwise_lse`.
      parameter_sharding: "replicated" or "fsdp", see `infcl_jax.training.create_state`.
      loss: "clip" or a global contrastive loss.
      parts: whether the parts of the step are timed too.
      repeats: timed runs of each program, of which the median counts; 0: its first call counts.
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
class Case:
    """One batch size and what is measured of it.

    Attributes:
      settings: what to measure.
      mesh: the devices.
      b: global batch size.
      loss_fn: the loss of the run.
    """

    settings: Settings
    mesh: Mesh
    b: int
    loss_fn: LossFn | GlobalContrastive

    @classmethod
    def create(cls, settings: Settings, mesh: Mesh, b: int) -> Self:
        """The case with its loss, before anything is measured.

        Args:
          settings: what to measure.
          mesh: the devices.
          b: global batch size, a multiple of their number.

        Raises:
          ValueError: there is no such loss or implementation, or the loss needs a batch that lives somewhere.
        """
        if settings.loss == "clip":
            return cls(settings, mesh, b, make_loss(settings.loss, mesh, settings.implementation))
        loss_fn = GlobalContrastive(
            variant=settings.loss,
            config=GlobalContrastiveConfig(),
            steps_per_epoch=max(1, _SAMPLES // b),
            mesh=mesh,
            implementation=settings.implementation,
        )
        case = cls(settings, mesh, b, loss_fn)
        case._train_step(settings.cache)  # which refuses a batch that lives nowhere
        return case

    def figures(self, product: Product) -> Iterator[dict[str, float]]:
        """Figure after figure, so that those before memory runs out are known.

        Args:
          product: the ceiling that the rate is compared with.

        Yields:
          Values by name, of `FIGURES`, each name at most once.
        """
        config, cache, repeats = self.settings.model_config, self.settings.cache, self.settings.repeats
        rows = self.b * len(self.mesh.local_devices) // self.mesh.size
        if cache.residency == "replay":
            reader = RandomReader(config, rows, self.mesh, cache.chunk_size)
            pairs = dict[str, Any](replayed(reader, cache.chunk_size, self.mesh))
        else:
            pairs = dict[str, Any](draw_pairs(config, rows))
        if isinstance(self.loss_fn, GlobalContrastive):
            pairs["index"] = np.arange(rows, dtype=np.int32) + jax.process_index() * rows
        batch = shard_batch(self.mesh, pairs) if cache.residency == "device" else pairs
        state, step = self._initial_state(), self._train_step(cache)
        if cache.residency == "device":
            step = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
            yield {"memory_mib": compiled_bytes(step) / 2**20}
        before = peak_bytes(self.mesh)
        train = _Training(step, state, batch)
        seconds = harness.seconds(train, repeats, _STEP_SECONDS)
        rate = harness.tflops(step_flops(config) * self.b, seconds, self.mesh.size)
        yield {"step_ms": 1e3 * seconds, "tflops": rate, "of_product": rate / product.tflops}
        images = self.b / seconds
        yield {"images_per_second": images, "images_per_second_per_device": images / self.mesh.size}
        if (peak := peak_bytes(self.mesh)) > before:
            yield {"peak_memory_mib": peak / 2**20}
        if not self.settings.parts:
            return
        yield from self._parts(train)
        if cache.residency == "replay":  # and there is no batch that could have been on the devices before
            return
        try:
            yield {"data_ms": 1e3 * self._waiting_for_data(train, pairs, seconds)}
        except jax.errors.JaxRuntimeError as error:  # the step itself fits
            if not harness.is_out_of_memory(error):
                raise

    def _initial_state(self) -> TrainState:
        """Fresh parameters, and the optimizer of `configs/base.py`."""
        config, run = self.settings.model_config, base.get_config()
        optimizer = make_optimizer(OptimizerConfig(**run.optimizer), run.total_steps)
        sizes = config.vision.image_size, config.text.context_length
        sharding = self.settings.parameter_sharding
        state = create_state(build_model(config), optimizer, *sizes, _SEED, self.mesh, sharding)
        if not isinstance(self.loss_fn, GlobalContrastive):
            return state
        samples = initial_samples(self.loss_fn.variant, _SAMPLES, config.init_logit_scale, self.mesh)
        return state.replace(samples=samples)

    def _train_step(self, cache: GradCacheConfig) -> TrainStep:
        """The step as `experiments.train` makes it, with this gradient caching."""
        return make_train_step(self.loss_fn, _SEED, cache, self.mesh, self.settings.parameter_sharding)

    def _parts(self, train: _Training) -> Iterator[dict[str, float]]:
        """Times of the parts, each compiled for itself on the shapes of the step."""
        repeats = self.settings.repeats
        key = jax.jit(lambda step: jax.random.fold_in(jax.random.key(_SEED), step))(train.state.step)
        args = train.state.params, train.batch, key
        encode = functools.partial(self._passes(backward=False), *args)
        encode_seconds = harness.seconds(encode, repeats)
        yield {"encode_ms": 1e3 * encode_seconds}
        _, features = encode()
        yield {"loss_ms": 1e3 * self._loss_program(train, features).seconds(repeats)}
        del features
        both = functools.partial(self._passes(backward=True), *args)
        yield {"backward_ms": 1e3 * (harness.seconds(both, repeats) - encode_seconds)}
        _, grads = both()
        update = jax.jit(lambda state, grads: (state.apply_gradients(grads=grads), None), donate_argnums=0)
        updating = _Training(update, train.state, grads)
        yield {"update_ms": 1e3 * harness.seconds(updating, repeats)}
        train.state = updating.state

    def _passes(self, *, backward: bool) -> Callable[..., Any]:
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
            keep_names=cache.keep_names,
            frozen=() if backward else names,
            has_aux=True,
            residency="device" if cache.residency == "device" else "host",
            sharding=NamedSharding(self.mesh, PartitionSpec(DATA_AXIS)) if self.mesh.size > 1 else None,
        )
        run = function if backward else lambda *args: function(*args)[0]
        return jax.jit(run) if cache.residency == "device" else run

    def _loss_program(self, train: _Training, features: dict[str, jax.Array]) -> Program:
        """The loss with its gradients over features and scale."""

        def loss(image: jax.Array, text: jax.Array, scale: jax.Array, memory: dict[str, Any]) -> jax.Array:
            return evaluate_loss(self.loss_fn, CLIPOutput(image, text, scale, None), memory)[0]

        scale = replicate(self.mesh, np.float32(1 / 0.07))
        memory = memory_of(self.loss_fn, train.state, train.batch)
        return Program(jax.value_and_grad(loss, argnums=(0, 1, 2)), features["image"], features["text"], scale, memory)

    def _waiting_for_data(self, train: _Training, pairs: Any, seconds: float) -> float:
        """How much longer a step takes if its batch comes from host memory than if it is on the devices already."""
        cache, repeats = self.settings.cache, self.settings.repeats
        if cache.residency == "device":
            fed = _FedTraining(train.step, train.state, pairs, self.mesh)
            return harness.seconds(fed, repeats, _STEP_SECONDS) - seconds
        on_devices = dataclasses.replace(cache, residency="device")
        resident = _Training(self._train_step(on_devices), train.state, shard_batch(self.mesh, pairs))
        return seconds - harness.seconds(resident, repeats, _STEP_SECONDS)


def draw_pairs(config: CLIPConfig, rows: int) -> dict[str, np.ndarray]:
    """Random images, uint8 `[rows, size, size, 3]`, and token ids, int32 `[rows, context_length]`, of a process."""
    rng = np.random.default_rng(jax.process_index())
    return {"image": _draw_images(rng, config, rows), "text": _draw_texts(rng, config, rows)}


def _draw_images(rng: np.random.Generator, config: CLIPConfig, rows: int) -> np.ndarray:
    size = config.vision.image_size
    return rng.integers(0, 256, (rows, size, size, 3), dtype=np.uint8)


def _draw_texts(rng: np.random.Generator, config: CLIPConfig, rows: int) -> np.ndarray:
    text = config.text
    return rng.integers(0, text.vocab_size, (rows, text.context_length), dtype=np.int32)


class RandomReader:
    """Random pairs of a process, of which few images are in memory: every chunk has some of the same ones in a row.

    Args:
      config: of the model.
      rows: of the process.
      mesh: all devices.
      chunk_size: rows encoded at once, over all devices.
    """

    def __init__(self, config: CLIPConfig, rows: int, mesh: Mesh, chunk_size: int) -> None:
        self.rows, self._config = rows, config
        pool = _POOL_CHUNKS * chunk_size * len(mesh.local_devices) // mesh.size
        self._images = _draw_images(np.random.default_rng(jax.process_index()), config, pool)

    def read(self, spans: list[slice]) -> dict[str, np.ndarray]:
        """Images and token ids of some spans of rows, as `draw_pairs`; the same whenever asked. Texts are all new."""
        count, first = sum(span.stop - span.start for span in spans), spans[0].start
        start = first % (len(self._images) - count + 1)
        rng = np.random.default_rng((jax.process_index(), first))
        return {"image": self._images[start : start + count], "text": _draw_texts(rng, self._config, count)}


def peak_bytes(mesh: Mesh) -> int:
    """The most bytes that a device of this process has had in use so far; 0 where devices do not say."""
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in mesh.local_devices)
