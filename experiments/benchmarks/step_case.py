"""Measurement of one batch size for `experiments.benchmarks.step`.

Times the step, its phases and the exposed data transfer, and measures memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmarks import harness, step_files, timing
from experiments.benchmarks.loss_case import IDS, draw_ids
from experiments.benchmarks.step_pairs import RandomReader, draw_lengths, draw_pairs
from experiments.benchmarks.timing import Gemm, Program
from experiments.command_line import option
from infcl_jax.data.packing import PADDED, PackedEntry, Packing, TextPacker
from infcl_jax.grad_cache import cached_value_and_grad
from infcl_jax.losses import DistilledLoss, Loss, MatryoshkaLoss
from infcl_jax.losses.base import IMAGE_TEXT_TEACHER, Targets
from infcl_jax.models import CLIPConfig, CLIPOutput, build_model, model_config
from infcl_jax.models.flops import step_flops
from infcl_jax.planner import compiled_bytes
from infcl_jax.runtime.mesh import DATA_AXIS, replicate, shard_batch
from infcl_jax.runtime.progress import peak_memory
from infcl_jax.settings import TEXT_PACKINGS, RunConfig, model_changes, total_steps, with_changes
from infcl_jax.training import (
    LOSSES,
    NO_CACHE,
    GradCacheConfig,
    TrainState,
    create_state,
    make_loss,
    make_optimizer,
    make_train_step,
    replayed,
)
from infcl_jax.training.sharding import PARAMETER_SHARDINGS
from infcl_jax.training.step import TrainStep, evaluate_loss, loss_inputs

_SEED = 0
_PROFILE = 50_000  # captions of the profile by which texts are packed
# Least duration of a timed run, in seconds. Launching a step takes 1 to 3 ms.
_STEP_SECONDS = 0.5
# Dataset size for the sample state of global contrastive losses: that of CC3M.
_SAMPLES = 2_700_000
# Inverse temperature of the teacher, whose features are random.
_TEACHER_SCALE = 50.0

# Keys of a record that `Case.figures` may yield.
FIGURES = (
    *("step_ms", "images_per_second", "images_per_second_per_device", "tflops", "gemm_fraction"),
    *("encode_ms", "loss_ms", "backward_ms", "update_ms", "data_ms", "memory_mib", "peak_memory_mib"),
    *step_files.FIGURES,
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Benchmark cases: training of one model at every batch size.

    `batch` has global batch sizes b, multiples of the device count. `data` is a dataset of files that also feeds the
    step. The median of `repeats` timed runs is reported; 0: the time of the first call.
    """

    model: str = option("ViT-B/32", "Model name or path of an OpenCLIP config, as config.model.")
    batch: tuple[int, ...] = ()
    model_overrides: str = option("", "Model changes, such as vision.remat=dots.")
    cache: GradCacheConfig = NO_CACHE
    implementation: str | None = option(None, "Implementation of the loss; None: the best here.")
    parameter_sharding: str = option("replicated", "Sharding of the state.", known=PARAMETER_SHARDINGS)
    loss: str = option("clip", "Loss of images and texts.", known=[name for name in LOSSES if name != "retrieval"])
    ids: str = option(
        "none", "Ids of the positives: none (the pairs), unique, 1% (repeat another), 8 (every id 8 times).", known=IDS
    )
    matryoshka: tuple[int, ...] = option((), "Sizes of the feature prefixes, as config.matryoshka.")
    teacher_features: int | None = option(
        None, "Feature dimension of a teacher, for a loss with distillation.", lower_bound=1
    )
    caption_lengths: str = option(
        "full",
        "Tokens of each text: full (the context length), laion (those of web captions, a mean of 21), or a file with a "
        "number in each line, from which they are drawn.",
    )
    text_packing: str = option("auto", "Encoding of shorter texts, as config.text_packing.", known=TEXT_PACKINGS)
    phases: bool = option(True, "Also time the phases of the step and exposed data transfer.")
    data: str | None = None
    repeats: int = 5
    precision: str = "auto"

    @functools.cached_property
    def model_config(self) -> CLIPConfig:
        """Model configuration with its overrides."""
        return model_config(self.model, **model_changes(self.precision, self.model_overrides))

    @functools.cached_property
    def profile(self) -> np.ndarray | None:
        """Numbers of tokens of many texts; None for those of the context length."""
        if self.caption_lengths == "full":
            return None
        return draw_lengths(self.caption_lengths, _PROFILE, self.model_config.text.context_length)

    @property
    def flops(self) -> int:
        """FLOPs of a pair, of the tokens that count."""
        return step_flops(self.model_config, text_tokens=None if self.profile is None else round(self.profile.mean()))


@dataclasses.dataclass
class _Training:
    """Train state and step function; each call is one step."""

    step: TrainStep
    state: TrainState
    batch: Any

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return self.state, metrics


@dataclasses.dataclass
class _StreamingTraining(_Training):
    """Training with host-to-device transfer of each batch, as in `experiments.train`.

    The transfer overlaps with the previous step.
    """

    mesh: Mesh
    metrics: Any = None

    def __call__(self) -> Any:
        batch, previous = shard_batch(self.mesh, self.batch), self.metrics
        self.state, self.metrics = self.step(self.state, batch)
        jax.block_until_ready(previous)  # bounds device memory to two batches
        return self.state, self.metrics


@dataclasses.dataclass(frozen=True)
class Case:
    """Benchmark case of one batch size."""

    settings: Settings
    mesh: Mesh
    b: int
    loss_fn: Loss

    @classmethod
    def create(cls, settings: Settings, mesh: Mesh, b: int) -> Self:
        """Create a case with its loss."""
        steps_per_epoch = max(1, _SAMPLES // b)
        targets = Targets("pair" if settings.ids == "none" else "caption")
        loss_fn = make_loss(
            settings.loss, mesh, settings.implementation, targets=targets, steps_per_epoch=steps_per_epoch
        )
        if settings.teacher_features is not None:
            loss_fn = DistilledLoss.wrap(loss_fn, weight=1.0, teacher_scale=_TEACHER_SCALE)
        if settings.matryoshka:
            loss_fn = MatryoshkaLoss.wrap(loss_fn, settings.matryoshka)
        case = cls(settings, mesh, b, loss_fn)
        case._train_step(settings.cache)  # raises if the loss does not support the offload
        if settings.data is not None:
            step_files.open_data(case._run_config(), mesh).close()  # raises if the dataset is wrong
        return case

    def figures(self, gemm: Gemm) -> Iterator[dict[str, float]]:
        """Yield figures one at a time, to record those before an out-of-memory error.

        Yields:
          Values by name, a subset of `FIGURES`. Each name occurs at most once.
        """
        config, cache, repeats = self.settings.model_config, self.settings.cache, self.settings.repeats
        rows = self.b * len(self.mesh.local_devices) // self.mesh.size
        if cache.offload == "replay":
            reader = RandomReader(config, rows, self.mesh, cache.chunk_size, self.settings.profile)
            pairs = dict[str, Any](replayed(reader, cache.chunk_size, self.mesh, pack=self._packer()))
        else:
            pairs = self._packer().plan(draw_pairs(config, rows, self.settings.profile))
        pairs |= self._loss_inputs(rows)
        batch = shard_batch(self.mesh, pairs) if cache.offload == "none" else pairs
        state, step = self._initial_state(), self._train_step(cache)
        if cache.offload == "none":
            step = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
            yield {"memory_mib": compiled_bytes(step) / 2**20}
        peak_before = peak_bytes(self.mesh)
        train = _Training(step, state, batch)
        seconds = timing.seconds(train, repeats, _STEP_SECONDS)
        rate = timing.tflops(self.settings.flops * self.b, seconds, self.mesh.size)
        yield {"step_ms": 1e3 * seconds, "tflops": rate, "gemm_fraction": rate / gemm.tflops}
        images = self.b / seconds
        yield {"images_per_second": images, "images_per_second_per_device": images / self.mesh.size}
        if (peak := peak_bytes(self.mesh)) > peak_before:
            yield {"peak_memory_mib": peak / 2**20}
        if self.settings.data is not None:
            yield from step_files.file_figures(self._run_config(), self.mesh, step, train.state, seconds, repeats)
            train.state = self._initial_state()  # the old one is donated
        if not self.settings.phases:
            return
        yield from self._phase_times(train)
        if cache.offload == "replay":  # no batch in device memory to compare with
            return
        try:
            yield {"data_ms": 1e3 * self._exposed_transfer(train, pairs, seconds)}
        except jax.errors.JaxRuntimeError as error:  # the step fits, but the second batch or program may not
            if not harness.is_out_of_memory(error):
                raise

    def _packer(self) -> TextPacker:
        """Return the packing of the texts, which pads those of full length."""
        profile, tower = self.settings.profile, build_model(self.settings.model_config).text
        if profile is None or self.settings.text_packing == "off":
            return PADDED
        shard = (self.settings.cache.chunk_size or self.b) // self.mesh.size
        packing = Packing.of(profile, shard, shards=self.b // shard)
        return TextPacker({"text": PackedEntry(packing, tower.lengths, profile.mean())}, len(self.mesh.local_devices))

    def _run_config(self) -> RunConfig:
        """Return the settings of a run on the files."""
        names = ("model", "model_overrides", "precision", "loss", "implementation", "parameter_sharding")
        changes = {name: getattr(self.settings, name) for name in names} | {"dataset": self.settings.data}
        return with_changes(RunConfig(), changes | {"batch_size": self.b, "grad_cache": self.settings.cache.to_dict()})

    def _initial_state(self) -> TrainState:
        """Initialize parameters, the optimizer of `configs/base.py` and sample state."""
        config, settings = self.settings.model_config, RunConfig()
        optimizer = make_optimizer(settings.optimizer, total_steps(settings))
        sizes = config.vision.image_size, config.text.context_length
        sharding = self.settings.parameter_sharding
        state = create_state(build_model(config), optimizer, *sizes, _SEED, self.mesh, sharding)
        return state.replace(samples=self.loss_fn.init_samples(_SAMPLES, config.init_logit_scale))

    def _loss_inputs(self, rows: int) -> dict[str, np.ndarray]:
        """Draw what the loss reads of a batch besides images and texts, for this process."""
        first, inputs = jax.process_index() * rows, dict[str, np.ndarray]()
        if "index" in self.loss_fn.batch_inputs:
            inputs["index"] = np.arange(first, first + rows, dtype=np.int32)
        if (ids := draw_ids(self.settings.ids, self.b)) is not None:
            inputs["ids"] = np.stack([ids, ids], axis=1)[first : first + rows]
        if (width := self.settings.teacher_features) is not None:
            rng = np.random.default_rng(jax.process_index())
            for name in IMAGE_TEXT_TEACHER:
                features = rng.standard_normal((rows, width), np.float32)
                inputs[name] = features / np.linalg.norm(features, axis=1, keepdims=True)
        return inputs

    def _train_step(self, cache: GradCacheConfig) -> TrainStep:
        """Create the train step of `experiments.train`, with the given gradient caching."""
        return make_train_step(self.loss_fn, _SEED, cache, self.mesh, self.settings.parameter_sharding)

    def _phase_times(self, train: _Training) -> Iterator[dict[str, float]]:
        """Time the phases of the step.

        Each phase is compiled separately, on the shapes of the step.

        Yields:
          Milliseconds by name: encoding, loss, backward pass and optimizer update.
        """
        repeats = self.settings.repeats
        key = jax.jit(lambda step: jax.random.fold_in(jax.random.key(_SEED), step))(train.state.step)
        args = train.state.params, train.batch, key
        encode = functools.partial(self._encoder_passes(backward=False), *args)
        encode_seconds = timing.seconds(encode, repeats)
        yield {"encode_ms": 1e3 * encode_seconds}
        _, features = encode()
        yield {"loss_ms": 1e3 * self._loss_program(train, features).seconds(repeats)}
        del features
        encode_backward = functools.partial(self._encoder_passes(backward=True), *args)
        yield {"backward_ms": 1e3 * (timing.seconds(encode_backward, repeats) - encode_seconds)}
        _, grads = encode_backward()
        update = jax.jit(lambda state, grads: (state.apply_gradients(grads=grads), None), donate_argnums=0)
        updating = _Training(update, train.state, grads)
        yield {"update_ms": 1e3 * timing.seconds(updating, repeats)}
        train.state = updating.state

    def _encoder_passes(self, *, backward: bool) -> Callable[..., Any]:
        """Create the step's encoder passes: forward, or forward and backward.

        Args:
          backward: whether to compute the gradients of the sum of all features.

        Returns:
          A function `(params, batch, key) -> ((sum of the features, features), gradients)`. Without `backward` it
          returns only `(sum of the features, features)`.
        """
        model, cache, names = build_model(self.settings.model_config), self.settings.cache, ("image", "text")
        if cache.chunk_size is None:  # one chunk, encoded once
            cache = GradCacheConfig(chunk_size=self.b, keep=1)

        def encoder(name: str) -> Callable[..., Any]:
            def encode(params: Any, chunk: Any, key: jax.Array) -> Any:
                rngs = {"dropout": key}
                return model.apply({"params": params}, chunk, train=True, method=f"encode_{name}", rngs=rngs)

            return encode

        def feature_sum(params: Any, features: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
            return jnp.sum(features["image"] + features["text"], dtype=jnp.float32), features

        function = cached_value_and_grad(
            {name: encoder(name) for name in names},
            feature_sum,
            frozen=() if backward else names,
            has_aux=True,
            sharding=NamedSharding(self.mesh, PartitionSpec(DATA_AXIS)) if self.mesh.size > 1 else None,
            **cache.options,
        )
        run = function if backward else lambda *args: function(*args)[0]
        return jax.jit(run) if cache.offload == "none" else run

    def _loss_program(self, train: _Training, features: dict[str, jax.Array]) -> Program:
        """Compile the loss with its gradients over features and scale."""

        def loss(image: jax.Array, text: jax.Array, scale: jax.Array, inputs: dict[str, Any]) -> jax.Array:
            return evaluate_loss(self.loss_fn, CLIPOutput(image, text, scale, bias), inputs)[0]

        scale = replicate(self.mesh, np.float32(1 / 0.07))
        init_bias = self.settings.model_config.init_logit_bias
        bias = None if init_bias is None else jnp.float32(init_bias)
        inputs = loss_inputs(self.loss_fn, train.state, train.batch)
        return Program(jax.value_and_grad(loss, argnums=(0, 1, 2)), features["image"], features["text"], scale, inputs)

    def _exposed_transfer(self, train: _Training, pairs: Any, seconds: float) -> float:
        """Measure the exposed host-to-device transfer of a step, in seconds.

        It is the time of a step with the batch in host memory minus that of a step with the batch in device memory.
        """
        cache, repeats = self.settings.cache, self.settings.repeats
        if cache.offload == "none":
            streaming = _StreamingTraining(train.step, train.state, pairs, self.mesh)
            return timing.seconds(streaming, repeats, _STEP_SECONDS) - seconds
        on_devices = dataclasses.replace(cache, offload="none")
        resident = _Training(self._train_step(on_devices), train.state, shard_batch(self.mesh, pairs))
        return seconds - timing.seconds(resident, repeats, _STEP_SECONDS)


def peak_bytes(mesh: Mesh) -> int:
    """Return the peak memory of a device in bytes; 0 if unknown.

    The maximum over this process's devices, since the process started.
    """
    return peak_memory(mesh.local_devices) or 0
