"""Parts of a run, whatever its kind of training data."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.data import FeatureStore, PairTexts, Source, TrainIterator, check_vocabulary, load_tokenizer
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer
from infcl_jax.data.tokenizers.clip import CLIP_VOCAB_SIZE
from infcl_jax.evaluation import Suite, TextRetrievalSuite
from infcl_jax.inference.pretrained_tokenizer import TOKENIZER_FOLDER, check_padding_side
from infcl_jax.losses import DistilledLoss, Loss, MatryoshkaLoss, SampleState
from infcl_jax.losses.base import Targets
from infcl_jax.models import (
    BertConfig,
    CLIPConfig,
    TextConfig,
    TextPairConfig,
    build_model,
    text_pair_config,
    variable_shapes,
)
from infcl_jax.models.clip import row_shapes
from infcl_jax.ops.pairwise.lse.guide import Margin
from infcl_jax.run.frozen_towers import FeatureCache, Teacher, TeacherInputs
from infcl_jax.run.model import overridden_model, restored_model
from infcl_jax.run.text_packing import TextPacking, TextReader, choose_packing, counts_alike, text_towers
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.settings import RunConfig, total_steps, with_changes
from infcl_jax.training import (
    GradCacheConfig,
    TrainState,
    check_optimizer,
    loss_class,
    make_loss,
    make_optimizer,
    make_train_step,
)
from infcl_jax.training.compiled_step import device_memory_limit, utilization
from infcl_jax.training.grad_cache import KEEP_MOST
from infcl_jax.training.state import StateInit
from infcl_jax.training.step import TrainStep

if TYPE_CHECKING:
    from infcl_jax.planner import Workload

_TOKENIZER_BY_VOCAB_SIZE = {CLIP_VOCAB_SIZE: "clip", ByteTokenizer.vocab_size: "bytes"}


@dataclasses.dataclass(frozen=True, eq=False)
class Run[C: (CLIPConfig, TextPairConfig), E](abc.ABC):
    """Parts of a run, each built once, on first use; `C` is its model configuration, `E` its encoder.

    Attributes:
      unit: name of the rows of a batch.
      passages: rows of the second tower for each row of the first.
      prefixes: sizes of the feature prefixes to train and evaluate.
      precomputed: frozen towers whose features are cached.
      init_logit_scale: initial logarithm of the inverse temperature.
      config: settings. Those of `build_run` have values for `total_steps`, `precision` and `model`.
      mesh: devices over which the batch is sharded; None is enough for a plan, and a loss on one device.
      source: training data; None is enough for losses without sample state and runs without `epochs`.
      origin: directory of the resumed or forked run; None for a new one.
      recorded: settings of the run in `origin`; None without them.
      changed: settings that differ from the recorded ones, as (old, new).
      teacher: frozen model of distillation or guided negatives; None without one.
      given_tokenizer: tokenizer in place of the one that the settings name; None for that one.
      check: function that evaluations call before each batch and task, which may raise to end them.
      say: function that prints a line of progress of evaluations.
    """

    unit: ClassVar[str]
    passages: ClassVar[Any] = 1
    prefixes: ClassVar[Any] = ()
    precomputed: ClassVar[Any] = ()
    init_logit_scale: ClassVar[Any] = 0.0

    config: RunConfig
    mesh: Mesh | None = None
    source: Source | None = None
    origin: Path | None = None
    recorded: RunConfig | None = None
    changed: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    teacher: Teacher | None = None
    given_tokenizer: BaseTokenizer | None = None
    check: Callable[[], None] = lambda: None
    say: Callable[[str], object] = lambda line: None

    @property
    @abc.abstractmethod
    def base_model(self) -> C:
        """Model configuration without overrides."""

    @functools.cached_property
    def model_config(self) -> C:
        """Model configuration with overrides, see `infcl_jax.run.read_model_config`."""
        return overridden_model(self.config, self.base_model)

    @functools.cached_property
    def model(self) -> Any:
        """Flax module of the model."""
        return build_model(self.model_config)

    @abc.abstractmethod
    def tokenizer_of_weights(self) -> BaseTokenizer | None:
        """Load the tokenizer of the initial weights; None without weights."""

    @functools.cached_property
    def tokenizer(self) -> BaseTokenizer:
        """Tokenizer of the texts, which fits the model.

        It is `given_tokenizer`, else the run's copy, the setting `tokenizer`, the tokenizer of the initial weights or
        the usual one of the vocabulary.
        """
        if self.given_tokenizer is not None:
            return self.given_tokenizer
        config, text, tokenizer = self.config, self.model_config.text, None
        spec, size = config.tokenizer, self.base_model.text.vocab_size
        if self.origin is not None and (copied := self.origin / TOKENIZER_FOLDER).is_dir():
            spec = str(copied)
        elif spec is None:
            spec = _TOKENIZER_BY_VOCAB_SIZE.get(size)
            if spec is None or config.model is None:
                tokenizer = self.tokenizer_of_weights()
        if tokenizer is None and spec is None:
            raise ValueError(
                f"expected a tokenizer for the {size} token ids of the model {config.model!r}, got None; set tokenizer"
            )
        tokenizer = tokenizer or load_tokenizer(spec, text.context_length, clean=config.text_cleaning)
        end_token = text.end_token if isinstance(text, TextConfig) and text.pool == "end" else tokenizer.end_id
        check_vocabulary(tokenizer, text.vocab_size, end_token)
        check_padding_side(tokenizer, text)
        if isinstance(text, BertConfig) and text.pad_id != tokenizer.pad_id:
            raise ValueError(
                f"expected text.pad_id={tokenizer.pad_id}, as in the tokenizer {tokenizer.kind!r}, got {text.pad_id}; "
                "set it in model_overrides, or choose another tokenizer"
            )
        return tokenizer

    @property
    def texts(self) -> BaseTokenizer | PairTexts:
        """Tokenization of the texts of a batch."""
        return self.tokenizer

    @functools.cached_property
    def loss(self) -> Loss:
        """Training loss on the mesh."""
        return self.make_loss(1.0 if self.teacher is None else self.teacher.scale)

    def make_loss(self, teacher_scale: float) -> Loss:
        """Create the loss for a teacher with this inverse temperature, see `infcl_jax.run.loss`."""
        config = self.config
        guide = None if config.guide.model is None else Margin(config.guide.margin, config.guide.margin_strategy)
        loss = make_loss(
            config.loss,
            self.mesh,
            config.implementation,
            config.max_logit_scale,
            targets=Targets(config.positives, config.multi_positive, config.label_smoothing, guide),
            config=config.global_contrastive,
            # A batch larger than the dataset is an error of `training_data`, which names both sizes.
            steps_per_epoch=max(1, self.samples // config.batch_size),
            optimizer=config.optimizer,
        )
        if config.distill.teacher is not None:
            loss = DistilledLoss.wrap(loss, config.distill.weight, teacher_scale)
        return MatryoshkaLoss.wrap(loss, self.prefixes) if self.prefixes else loss

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
    def grad_cache(self) -> GradCacheConfig:
        """Gradient caching, with as many stored chunks as fit for `grad_cache.keep = -1`."""
        if self.config.grad_cache.keep == KEEP_MOST:
            return self.workload.cache
        cache = self.config.grad_cache
        cache.check_batch(self.config.batch_size, self.mesh.size)
        return cache

    @functools.cached_property
    def workload(self) -> "Workload":
        """Settings that determine the memory of a step, for the planner."""
        from infcl_jax.run.plan import run_workload  # the training of a run does not import the planner

        # A collective: a process that has run out of memory must not start it alone.
        limit = device_memory_limit() if self.config.grad_cache.keep == KEEP_MOST else None
        return run_workload(self, self.mesh.size, limit)

    def init_samples(self) -> SampleState | None:
        """Initialize the sample state; None for losses without it."""
        return self.loss.init_samples(self.samples, self.init_logit_scale)

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
        arguments = config.seed, self.grad_cache, self.mesh, config.parameter_sharding, config.on_nonfinite
        step = make_train_step(self.loss, *arguments)
        if self.teacher is None:
            return step
        own, other = text_towers(self.model), text_towers(self.teacher.model)
        shared = self.teacher.own_tokens(self.texts) is None
        padded = [name for name, tower in other.items() if shared and not counts_alike(tower, own[name])]
        return self.teacher.with_features(step, self.mesh, self.grad_cache, padded)

    @functools.cached_property
    @abc.abstractmethod
    def suite(self) -> Suite | TextRetrievalSuite:
        """Evaluations of the run, see `infcl_jax.run.evaluation_suite`."""

    @property
    def text_towers(self) -> dict[str, Any]:
        """Text encoders by entry of a batch, also of a teacher's own token ids."""
        towers = text_towers(self.model)
        for name in self.precomputed:
            towers.pop(name, None)
        if self.teacher is not None and self.teacher.own_tokens(self.texts) is not None:
            towers |= text_towers(self.teacher.model, "teacher_")
        return towers

    @abc.abstractmethod
    def text_reader(self) -> TextReader:
        """Return the reader of the token ids of `text_towers`."""

    @functools.cached_property
    def text_packing(self) -> TextPacking:
        """Packing of texts by a profile of the data, which all processes must read."""
        if self.config.text_packing == "off":
            return TextPacking({}, {})
        return choose_packing(self, self.mesh.size)

    def with_padded_texts(self) -> Self:
        """Return the run with `text_packing="off"` and the other parts that are built."""
        run = dataclasses.replace(self, config=with_changes(self.config, {"text_packing": "off"}))
        kept = vars(self).keys() - vars(run).keys() - {"text_packing"}
        vars(run).update({name: vars(self)[name] for name in kept})
        return run

    @functools.cached_property
    def utilization(self) -> Callable[[float], float | None]:
        """Function from pairs per second to the model FLOPs utilization, see `compiled_step.utilization`."""
        config, kind = self.config, self.mesh.devices.flat[0].device_kind
        unlocked = {name: config.unlocked_groups[name] for name in config.frozen}
        packed = self.text_packing.packed.get("text")
        tokens = None if packed is None else round(packed.tokens)
        arguments = config.batch_size, self.mesh.size, kind, unlocked, self.precomputed, tokens
        return utilization(self.model_config, *arguments)

    def load_initial_weights(self, state: TrainState) -> TrainState:
        """Return the state of a new run with the parameters of the settings `init`."""
        return self._with_pretrained(state).with_limited_scale(self.loss.max_logit_scale)

    @abc.abstractmethod
    def _with_pretrained(self, state: TrainState) -> TrainState:
        """Replace the parameters that the settings `init` name, see `infcl_jax.run.initialize`."""

    @abc.abstractmethod
    def open_data(self) -> Source:
        """Open the training data."""

    def training_data(self, workdir: Path, state: TrainState | None, say: Callable[[str], None]) -> TrainIterator:
        """Cache the features of frozen towers and of a teacher, then create the iterator over training batches.

        All processes must call this method.

        Args:
          workdir: directory of the run.
          state: initial state, whose frozen towers encode; None for a finished run, which reads no features.
          say: function that prints a line of progress.
        """
        features, teacher = {}, None
        if state is not None:
            feature_cache = FeatureCache(self, workdir, say)
            if towers := self.precomputed:
                own = self.model, state.variables, self.tokenizer, self.config.cache_frozen
                features = feature_cache.features(towers, *own, "frozen")  # type: ignore[arg-type]
            if self.teacher is not None:
                teacher = self.teacher.inputs(self.texts, feature_cache)
        return self.open_iterator(features, teacher)

    @abc.abstractmethod
    def open_iterator(
        self, features: Mapping[str, FeatureStore] | None = None, teacher: TeacherInputs | None = None
    ) -> TrainIterator:
        """Create the endless iterator over this process's rows of batches, see `infcl_jax.run.training_data`."""

    def iterator_options(self) -> dict[str, Any]:
        """Return the arguments that the iterators over training batches share."""
        names = "batch_size", "seed", "num_workers", "num_threads", "prefetch_batches", "max_bad_records"
        processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        packer = self.text_packing.packer(len(self.mesh.local_devices))
        return {name: self.config[name] for name in names} | processes | {"packer": packer}

    def batch_shapes(self) -> dict[str, Any] | None:
        """Return shape, dtype and sharding of each array of a batch; None if only the first batch tells them."""
        return None

    @abc.abstractmethod
    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a batch that the step takes."""

    def next_batch(self, data: TrainIterator) -> dict[str, Any]:
        """Return the batch of the next step, see `infcl_jax.run.next_batch`."""
        inputs = self.inputs(next(data))
        if self.config.grad_cache.offload == "host":
            return inputs
        return jax.tree.map(
            lambda array: array if isinstance(array, jax.Array) else shard_batch(self.mesh, array), inputs
        )

    def load(
        self, step: int | None, tokenizer: str | BaseTokenizer | None, dtype: str | None, mesh: Mesh, batch_size: int
    ) -> E:
        """Load the encoder of a checkpoint in `origin`, see `infcl_jax.load`."""
        _, config, variables = restored_model(self.model_config, self.origin, mesh, step, dtype)
        if tokenizer is None:
            tokenizer = self.tokenizer
        elif not isinstance(tokenizer, BaseTokenizer):
            tokenizer = load_tokenizer(tokenizer, config.text.context_length)
        return self.encoder(config, variables, tokenizer, mesh, batch_size)

    @abc.abstractmethod
    def encoder(self, config: C, variables: Any, tokenizer: BaseTokenizer, mesh: Mesh, batch_size: int) -> E:
        """Return the encoder of a restored model."""

    @abc.abstractmethod
    def export(self, output: Path, format: str | None, dim: int | None) -> str:
        """Write the latest checkpoint in `origin` for other programs, see `infcl_jax.export`."""


def make_run(config: RunConfig, mesh: Mesh | None = None, source: Source | None = None, **fields: Any) -> Run:
    """Return a run of the kind that fits its model; `fields` are other fields of `Run`."""
    from infcl_jax.run.image_text import ImageTextRun  # the kinds import this module
    from infcl_jax.run.text_retrieval import TextRetrievalRun

    kind = ImageTextRun if text_pair_config(config.model) is None else TextRetrievalRun
    return kind(config, mesh, source, **fields)
