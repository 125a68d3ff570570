"""A run built from its settings, each part once."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.data import Source, TrainIterator
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.evaluation import Suite, TextRetrievalSuite
from infcl_jax.losses import DistilledLoss, Loss, MatryoshkaLoss, SampleState
from infcl_jax.losses.base import Targets
from infcl_jax.models import CLIP, TextPair, build_model, variable_shapes
from infcl_jax.models.clip import row_shapes
from infcl_jax.ops.pairwise_lse.implementations import best_implementation
from infcl_jax.run.frozen_towers import FeatureCache, Teacher, load_teacher
from infcl_jax.run.model import DEFAULT_MODEL
from infcl_jax.run.task import Task, task_of
from infcl_jax.settings import (
    SETTINGS,
    RunConfig,
    changed_settings,
    check_fixed,
    keep_recorded,
    resolved_precision,
    total_steps,
    with_changes,
    with_total_steps,
)
from infcl_jax.training import (
    GradCacheConfig,
    TrainState,
    check_optimizer,
    loss_class,
    make_loss,
    make_optimizer,
    make_train_step,
)
from infcl_jax.training.compiled_step import device_memory_limit
from infcl_jax.training.grad_cache import KEEP_MOST
from infcl_jax.training.state import StateInit
from infcl_jax.training.step import TrainStep
from infcl_jax.training.utilization import utilization

if TYPE_CHECKING:  # the training of a run does not import the planner
    from infcl_jax.planner import TeacherMemory, Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Parts of a run. Each is built on first use, once.

    Attributes:
      config: settings. Those of `build_run` have values for `total_steps`, `precision` and `model`.
      mesh: devices over which the batch is sharded; None is enough for a plan, and a loss on one device.
      source: training data; None is enough for losses without sample state and runs without `epochs`.
      origin: directory of the resumed or forked run; None for a new one.
      recorded: settings of the run in `origin`; None without them.
      changed: settings that differ from the recorded ones, as (old, new).
      check: function that evaluations call before each batch and task, which may raise to end them.
      say: function that prints a line of progress of evaluations.
    """

    config: RunConfig
    mesh: Mesh | None = None
    source: Source | None = None
    origin: Path | None = None
    recorded: RunConfig | None = None
    changed: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    teacher: Teacher | None = None
    check: Callable[[], None] | None = None
    say: Callable[[str], None] | None = None

    @functools.cached_property
    def task(self) -> Task:
        """What differs between kinds of training data."""
        return task_of(self.config)

    @functools.cached_property
    def tokenizer(self) -> BaseTokenizer:
        """Tokenizer of the texts, in an existing run its copy."""
        return self.task.tokenizer(self.origin)

    @functools.cached_property
    def model(self) -> CLIP | TextPair:
        """Flax module of the model."""
        return build_model(self.task.model_config)

    @functools.cached_property
    def loss(self) -> Loss:
        """Training loss on the mesh."""
        return self.make_loss(1.0 if self.teacher is None else self.teacher.scale)

    def make_loss(self, teacher_scale: float) -> Loss:
        """Create the loss for a teacher with this inverse temperature, see `infcl_jax.run.loss`."""
        config = self.config
        loss = make_loss(
            config.loss,
            self.mesh,
            config.implementation,
            config.max_logit_scale,
            targets=Targets(config.positives, config.multi_positive, config.label_smoothing),
            config=config.global_contrastive,
            # A batch larger than the dataset is an error of `training_data`, which names both sizes.
            steps_per_epoch=max(1, self.samples // config.batch_size),
            optimizer=config.optimizer,
        )
        if config.distill.teacher is not None:
            loss = DistilledLoss.wrap(loss, config.distill.weight, teacher_scale)
        return MatryoshkaLoss.wrap(loss, self.task.prefixes) if self.task.prefixes else loss

    @property
    def samples(self) -> int:
        """Number of samples in the sample state; 0 for losses without it."""
        if "samples" not in loss_class(self.config.loss).inputs:
            return 0
        if self.source is None:
            raise ValueError(
                f"expected a source with loss {self.config.loss!r}, got None; pass training_source(config)"
            )
        return len(self.source)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Optimizer, whose rules fit the model."""
        check_optimizer(self.config.optimizer, variable_shapes(self.model)["params"])
        return make_optimizer(self.config.optimizer, total_steps(self.config, self.source))

    @functools.cached_property
    def cache(self) -> GradCacheConfig:
        """Gradient caching, with as many stored chunks as fit for `grad_cache.keep = -1`."""
        if self.config.grad_cache.keep == KEEP_MOST:
            return self.workload.cache
        cache = self.config.grad_cache
        cache.check_batch(self.config.batch_size, self.mesh.size)
        return cache

    @functools.cached_property
    def workload(self) -> "Workload":
        """Settings that determine the memory of a step, for the planner."""
        # A collective, which a single process must not start after it has run out of memory.
        limit = device_memory_limit() if self.config.grad_cache.keep == KEEP_MOST else None
        return self.planned(self.mesh.size, limit)

    def planned(
        self,
        devices: int,
        memory_limit: int | None = None,
        implementation: str | None = None,
        teacher: "TeacherMemory | None" = None,
    ) -> "Workload":
        """Return the settings that determine the memory of a step, see `infcl_jax.run.workload`."""
        from infcl_jax.planner import SAFE_SHARE, TeacherMemory, Workload, store_activations, tree_bytes

        config, loss, cache = self.config, self.loss, self.config.grad_cache
        if teacher is None and self.teacher is not None:
            teacher = TeacherMemory(self.teacher.model, cached=self.teacher.cache is not None)
        best, stores_most = implementation or best_implementation(), cache.keep == KEEP_MOST
        workload = Workload(
            model=self.model,
            optimizer=self.optimizer,
            batch_size=config.batch_size,
            devices=devices,
            cache=dataclasses.replace(cache, keep=0) if stores_most else cache,
            implementation=config.implementation or (best if best in loss.implementations else "xla"),
            loss=config.loss,
            ema=config.ema is not None,
            sample_bytes=tree_bytes(jax.eval_shape(self.init_samples)) // devices,
            parameter_sharding=config.parameter_sharding,
            frozen=config.frozen,
            unlocked_groups=config.unlocked_groups,
            precomputed=self.task.precomputed,
            passages=self.task.passages,
            teacher=teacher,
            by_id=loss.targets.by_id,
        )
        if not stores_most:
            return workload
        if memory_limit is None:
            raise ValueError("expected grad_cache.keep >= 0 on devices that do not report their memory, got -1")
        return store_activations(workload, int(SAFE_SHARE * memory_limit))

    def init_samples(self) -> SampleState | None:
        """Initialize the sample state; None for losses without it."""
        return self.loss.init_samples(self.samples, self.task.init_logit_scale)

    @functools.cached_property
    def init(self) -> StateInit:
        """Initialization of the train state on the devices."""
        config = self.config
        init = StateInit.of(
            self.model,
            self.optimizer,
            tuple(row_shapes(self.model, 1).values()),
            config.seed,
            self.mesh,
            parameter_sharding=config.parameter_sharding,
            frozen=config.frozen,
            unlocked_groups=config.unlocked_groups,
            ema=config.ema,
        )
        return init.with_samples(self.init_samples, NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names)))

    @functools.cached_property
    def step(self) -> TrainStep:
        """Training step, which gets the teacher's features of its batch."""
        config = self.config
        arguments = config.seed, self.cache, self.mesh, config.parameter_sharding, config.on_nonfinite
        step = make_train_step(self.loss, *arguments)
        return step if self.teacher is None else self.teacher.with_features(step, self.mesh, self.cache)

    @functools.cached_property
    def suite(self) -> Suite | TextRetrievalSuite:
        """Evaluations."""
        return self.task.suite(self.model, self.tokenizer, self.mesh, self.say, self.check)  # type: ignore[arg-type]

    @functools.cached_property
    def utilization(self) -> Callable[[float], float | None]:
        """Function from pairs per second to the model FLOPs utilization, see `infcl_jax.training.utilization`."""
        config, kind = self.config, self.mesh.devices.flat[0].device_kind
        unlocked = {name: config.unlocked_groups[name] for name in config.frozen}
        sizes = config.batch_size, self.mesh.size
        return utilization(self.task.model_config, *sizes, kind, unlocked, self.task.precomputed)

    def initialized(self, state: TrainState) -> TrainState:
        """Return the state of a new run with the parameters of the settings `init`, and a limited logit scale."""
        return self.task.initialize(state).with_limited_scale(self.loss.max_logit_scale)

    def training_data(
        self, workdir: Path | None = None, state: TrainState | None = None, say: Callable[[str], None] = print
    ) -> TrainIterator:
        """Create the iterator over training batches.

        Cached features of frozen towers and of a teacher are computed first, for which all processes must call this
        method; without a state they are left out, for a finished run.
        """
        assert self.source is not None
        features, teacher = {}, None
        if workdir is not None and state is not None:
            cache = FeatureCache(
                self.source,
                workdir,
                rows=(self.cache.chunk_size or self.config.batch_size) // self.mesh.size,
                devices=self.mesh.local_devices,
                threads=self.config.num_threads,
                max_image_pixels=self.config.max_image_pixels,
                say=say,
            )
            if towers := self.task.precomputed:
                own = self.model, state.variables, self.tokenizer, self.config.cache_frozen
                features = cache.features(towers, *own, "frozen")  # type: ignore[arg-type]
            if self.teacher is not None:
                teacher = self.teacher.inputs(self.tokenizer, cache)
        return self.task.training_data(self.source, self.tokenizer, self.mesh, features, teacher)

    def batch_shapes(self) -> dict[str, Any] | None:
        """Return the shapes of a batch; None if they are known with the first batch only."""
        return self.task.batch_shapes(self.tokenizer, self.mesh)

    def next_batch(self, data: TrainIterator) -> dict[str, Any]:
        """Return the batch of the next step, see `infcl_jax.run.next_batch`."""
        return self.task.next_batch(data, self.mesh)


def build_run(
    config: RunConfig,
    mesh: Mesh,
    *,
    origin: Path | None = None,
    recorded: RunConfig | None = None,
    check: Callable[[], None] | None = None,
    doing: Callable[[str], None] = lambda phase: None,
) -> Run:
    """Build a run to train; a resumed run keeps the settings that were chosen at its start.

    `doing` gets the name of each phase. For the other arguments see `Run`.

    Raises:
      ValueError: a setting is wrong, or a resumed run changes a fixed one.
      FileNotFoundError: a dataset is not prepared, or weights are missing.
      ImportError: a package of the tokenizer is not installed.
    """
    doing("reading the dataset")
    source = task_of(config).source()
    config = with_total_steps(config, source)
    if recorded is not None:
        config = keep_recorded(recorded, config)
    chosen = {"precision": resolved_precision(config.precision, config.model_overrides)}
    if config.model is None and config.init.model is None:
        chosen["model"] = DEFAULT_MODEL
    config = with_changes(config, chosen)
    changed = {} if recorded is None else changed_settings(recorded, config)
    fixed = [name for name, setting in SETTINGS.items() if setting.fixed]
    check_fixed(changed, fixed, origin or "", "keep it, or choose another --workdir")
    doing("preparing the model")
    teacher = None if config.distill.teacher is None else load_teacher(config, mesh)
    run = Run(config, mesh, source, origin, recorded, changed, teacher, check)
    # Wrong settings end the run here, before its state is created.
    if config.keep_best is not None and (names := run.suite.metric_names) and config.keep_best not in names:
        raise ValueError(f"expected keep_best to be one of {', '.join(names)}, got {config.keep_best!r}")
    _ = run.step, run.suite, run.init
    return run
