"""Individual parts of a run, for custom training loops and measurements."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from infcl_jax.data import FeatureStore, Source, Tokenizer, TrainIterator
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.evaluation import Suite, TextRetrievalSuite
from infcl_jax.losses import Loss
from infcl_jax.run.base import make_run
from infcl_jax.run.frozen_towers import TeacherInputs
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.settings import AnyConfig, make_config
from infcl_jax.training import TrainState, loss_class

if TYPE_CHECKING:
    from infcl_jax.planner import TeacherMemory, Workload


def training_source(config: AnyConfig) -> Source:
    """Load the training data of a run, for `loss`, `training_data`, `initial_state` and `workload`.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> source = infcl_jax.run.training_source(config)
      >>> source.name, source.split
      ('digits', 'train')

    Raises:
      ValueError, FileNotFoundError: see `infcl_jax.data.load_source`.
    """
    return make_run(make_config(config)).open_data()


def sample_source(config: AnyConfig) -> Source | None:
    """Load the training data if the state or the length of the run depends on its size.

    Raises:
      ValueError, FileNotFoundError: the loss is unknown, or see `infcl_jax.data.load_source`.
    """
    config = make_config(config)
    needed = "samples" in loss_class(config.loss).inputs or config.epochs is not None
    return training_source(config) if needed else None


def training_data(
    config: AnyConfig,
    source: Source,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    features: Mapping[str, FeatureStore] | None = None,
    teacher: TeacherInputs | None = None,
) -> TrainIterator:
    """Create the endless iterator over this process's rows of training batches.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> data = infcl_jax.run.training_data(config, infcl_jax.run.training_source(config))
      >>> next(data)["image"].shape
      (32, 16, 16, 3)
      >>> data.close()

    Args:
      config: settings of the run.
      source: training data.
      tokenizer: tokenizer of the captions; None: `text_tokenizer(config)`.
      mesh: devices over which the batch is sharded; None: all.
      features: cached features of frozen towers, from `infcl_jax.data.cache_features`.
      teacher: tokens or cached features of a teacher, see `infcl_jax.data.feature_store`; for text retrieval its
        `PairTexts`.

    Raises:
      ValueError, FileNotFoundError: `decode` is not possible, or see `infcl_jax.data.train_iterator`.
    """
    mesh = data_mesh() if mesh is None else mesh
    return make_run(make_config(config), mesh, source, given_tokenizer=tokenizer).open_iterator(features, teacher)


def next_batch(config: AnyConfig, data: TrainIterator, mesh: Mesh) -> dict[str, Any]:
    """Return the batch of the next step where `grad_cache.offload` stores it.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> data = infcl_jax.run.training_data(config, infcl_jax.run.training_source(config), mesh=mesh)
      >>> batch = infcl_jax.run.next_batch(config, data, mesh)
      >>> batch["image"].shape, batch["image"].sharding.spec
      ((32, 16, 16, 3), P('data',))
      >>> data.close()

    Returns:
      "query", "passage" and "passage_mask" of a run of text retrieval. Of others, "image" (`ColorBatch` if colors are
      augmented), "text", for losses with sample state "index" (int32 sample indices), and for positives by id "ids"
      (int32 `[b, 2]`). Towers with cached features have `PrecomputedFeatures`. A run with a teacher has its cached
      features, "teacher_image" and "teacher_text", or the latter with the token ids of another tokenizer. The values
      are global arrays on the devices, this process's NumPy arrays, or `Replay`.
    """
    return make_run(make_config(config), mesh).next_batch(data)


def text_tokenizer(config: AnyConfig, workdir: str | Path | None = None) -> BaseTokenizer:
    """Load the tokenizer of a run and check that it fits the model.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> infcl_jax.run.text_tokenizer(config)(["a cat"]).shape
      (1, 36)

    Args:
      config: settings of the run.
      workdir: directory of an existing run, whose copy of the vocabulary is read if it has one.

    Raises:
      ValueError: the tokenizer is unknown, its vocabulary is missing, or it does not fit the model.
      ImportError: a package is missing, such as clip-anytorch with CLIP's vocabulary.
    """
    return make_run(make_config(config), origin=None if workdir is None else Path(workdir)).tokenizer


def evaluation_suite(
    config: AnyConfig,
    mesh: Mesh,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], object] = lambda line: None,
    check: Callable[[], None] = lambda: None,
) -> Suite | TextRetrievalSuite:
    """Create the evaluation suite of a run.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> suite = infcl_jax.run.evaluation_suite(config, mesh)
      >>> sorted(suite.chance)
      ['loss', 'validation/batch_loss', 'validation/loss', 'zero_shot/top1']

    Args:
      config: settings of the run.
      mesh: devices.
      tokenizer: tokenizer of captions and prompts; None: `text_tokenizer(config)`.
      say: function that prints a line of progress; by default there is no progress.
      check: function called before each batch and task, which may raise to end an evaluation.

    Raises:
      ValueError, FileNotFoundError: see `infcl_jax.evaluation.Suite`.
    """
    return make_run(make_config(config), mesh, given_tokenizer=tokenizer, say=say, check=check).suite


def loss(
    config: AnyConfig, mesh: Mesh | None, source: Source | None = None, teacher_scale: float | None = None
) -> Loss:
    """Create the loss of a run.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> infcl_jax.run.loss(config, mesh).name
      'clip'

    Args:
      config: settings of the run.
      mesh: devices over which the batch is sharded; None: one device.
      source: training data; None is enough for losses without sample state.
      teacher_scale: inverse temperature of the teacher of a run with distillation; None: 1.

    Raises:
      ValueError: the loss or the implementation is unknown, or a setting is wrong.
    """
    return make_run(make_config(config), mesh, source).make_loss(1.0 if teacher_scale is None else teacher_scale)


def initial_state(config: AnyConfig, mesh: Mesh, source: Source | None = None) -> TrainState:
    """Initialize parameters, moving averages, optimizer state and sample state on the devices.

    The sample state is sharded over the devices.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> state = infcl_jax.run.initial_state(config, mesh)
      >>> int(state.step)
      0

    Args:
      config: settings of the run.
      mesh: devices that hold the state.
      source: training data; None is enough for losses without sample state and runs without `epochs`.

    Raises:
      ValueError: a setting is wrong, or a rule of the optimizer matches no parameter.
    """
    return make_run(make_config(config), mesh, source).init.create()


def workload(
    config: AnyConfig,
    devices: int,
    memory_limit: int | None = None,
    implementation: str | None = None,
    source: Source | None = None,
    teacher: "TeacherMemory | None" = None,
) -> "Workload":
    """Return the settings of a run that determine its memory, for `infcl_jax.planner`.

    `grad_cache.keep = -1` becomes the number of stored chunks that fits, see `store_activations`.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> plan = plan_memory(infcl_jax.run.workload(config, devices=8))

    Args:
      config: settings of the run.
      devices: number of devices over which the batch is sharded.
      memory_limit: bytes that JAX may use on a device; None if unknown.
      implementation: implementation of the loss if the configuration names none; None: the best on this device.
      source: training data; None is enough for losses without sample state and runs without `epochs`.
      teacher: memory of the teacher of a run with distillation; None leaves it out.

    Raises:
      ValueError: a setting is wrong, or `grad_cache.keep` is -1 without chunks or a memory limit.
    """
    from infcl_jax.run.plan import run_workload  # the training of a run does not import the planner

    run = make_run(make_config(config), source=source)
    return run_workload(run, devices, memory_limit, implementation, teacher)
