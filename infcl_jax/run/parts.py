"""Loss, optimizer, initial state, evaluations and workload of a run."""

import dataclasses
from collections.abc import Callable

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.data import Source, Tokenizer
from infcl_jax.evaluation import Suite, TextRetrievalSuite
from infcl_jax.losses import DistilledLoss, Loss, MatryoshkaLoss
from infcl_jax.losses.base import Targets
from infcl_jax.losses.matryoshka import checked_dims
from infcl_jax.models import CLIPConfig, build_model
from infcl_jax.ops.pairwise_lse.implementations import best_implementation
from infcl_jax.planner import SAFE_SHARE, TeacherMemory, Workload, store_activations, tree_bytes
from infcl_jax.planner.activations import parameter_shapes
from infcl_jax.run.data import num_samples, precomputed_towers
from infcl_jax.run.model import image_resize, read_any_model, read_model_config, text_tokenizer
from infcl_jax.run.text_retrieval import pair_suite, read_text_pair
from infcl_jax.runtime.mesh import flat_mesh
from infcl_jax.settings import AnyConfig, RunConfig, make_config, total_steps
from infcl_jax.training import TrainState, check_optimizer, make_loss, make_optimizer
from infcl_jax.training.grad_cache import KEEP_MOST
from infcl_jax.training.state import StateInit


def evaluation_suite(
    config: AnyConfig,
    mesh: Mesh,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] | None = None,
    check: Callable[[], None] | None = None,
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
      say: function that prints a line of progress; None: no progress.
      check: function called before each batch and task, which may raise to end an evaluation; None: none.

    Raises:
      ValueError, FileNotFoundError: see `infcl_jax.evaluation.Suite`.
    """
    config = make_config(config)
    if (pair := read_text_pair(config)) is not None:
        return pair_suite(config, pair, mesh, tokenizer or text_tokenizer(config), check)
    model = read_model_config(config)
    return Suite(
        config.evaluation,
        build_model(model),
        tokenizer or text_tokenizer(config),
        image_size=model.vision.image_size,
        data_dir=config.data_dir,
        mesh=flat_mesh(mesh),
        implementation=config.implementation,
        train_batch_size=config.batch_size if config.loss == "clip" else None,
        evaluations=config.evaluations,
        prefixes=_prefixes(config),
        resize=image_resize(model),
        say=say,
        check=check,
        max_bad_records=config.max_bad_records,
        max_image_pixels=config.max_image_pixels,
    )


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
    config = make_config(config)
    one = make_loss(
        config.loss,
        mesh,
        config.implementation,
        config.max_logit_scale,
        targets=Targets(config.positives, config.multi_positive, config.label_smoothing),
        config=config.global_contrastive,
        # A batch larger than the dataset is an error of `training_data`, which names both sizes.
        steps_per_epoch=max(1, num_samples(config, source) // config.batch_size),
        optimizer=config.optimizer,
    )
    distill = config.distill
    if distill.teacher is not None:
        one = DistilledLoss.wrap(one, distill.weight, 1.0 if teacher_scale is None else teacher_scale)
    return MatryoshkaLoss.wrap(one, _prefixes(config)) if config.matryoshka else one


def _prefixes(config: RunConfig) -> tuple[int, ...]:
    """Return the prefix sizes of a run.

    Raises:
      ValueError: the sizes are not increasing, or larger than the features of the model.
    """
    dims, size = checked_dims("matryoshka", config.matryoshka), read_model_config(config).embed_dim
    if dims and dims[-1] > size:
        raise ValueError(f"expected matryoshka with sizes of at most {size}, the features of the model, got {dims}")
    return dims


def _optimizer(config: RunConfig, source: Source | None) -> optax.GradientTransformation:
    """Create the optimizer of a run, and check that its rules fit the model."""
    settings = config.optimizer
    check_optimizer(settings, parameter_shapes(build_model(read_any_model(config))))
    return make_optimizer(settings, total_steps(config, source))


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
    config = make_config(config)
    return state_init(config, mesh, source).create()


def state_init(config: RunConfig, mesh: Mesh, source: Source | None = None) -> StateInit:
    """Return the initialization of a run's state; for arguments and errors see `initial_state`."""
    model = read_any_model(config)
    sizes = model.vision.image_size if isinstance(model, CLIPConfig) else 0, model.text.context_length
    init = StateInit.of(
        build_model(model),
        _optimizer(config, source),
        *sizes,
        config.seed,
        mesh,
        parameter_sharding=config.parameter_sharding,
        frozen=config.frozen,
        unlocked_groups=config.unlocked_groups,
        ema=config.ema,
    )
    if not isinstance(model, CLIPConfig):
        return init
    loss_fn, arguments = loss(config, mesh, source), (num_samples(config, source), model.init_logit_scale)
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return init.with_samples(lambda: loss_fn.init_samples(*arguments), rows)


def workload(
    config: AnyConfig,
    devices: int,
    memory_limit: int | None = None,
    implementation: str | None = None,
    source: Source | None = None,
    teacher: TeacherMemory | None = None,
) -> Workload:
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
      teacher: memory of the teacher, `infcl_jax.run.teacher.Teacher.memory`; None leaves it out.

    Raises:
      ValueError: a setting is wrong, or `grad_cache.keep` is -1 without chunks or a memory limit.
    """
    config = make_config(config)
    model, loss_fn = read_any_model(config), loss(config, None, source)
    sizes = num_samples(config, source), getattr(model, "init_logit_scale", 0.0)
    samples = jax.eval_shape(lambda: loss_fn.init_samples(*sizes))
    best = implementation or best_implementation()
    chosen = config.implementation or (best if best in loss_fn.implementations else "xla")
    cache = config.grad_cache
    if stores_most := cache.keep == KEEP_MOST:
        cache = dataclasses.replace(cache, keep=0)
    unresolved = Workload(
        model=model,
        optimizer=_optimizer(config, source),
        batch_size=config.batch_size,
        devices=devices,
        cache=cache,
        implementation=chosen,
        loss=config.loss,
        ema=config.ema is not None,
        sample_bytes=tree_bytes(samples) // devices,
        parameter_sharding=config.parameter_sharding,
        frozen=config.frozen,
        unlocked_groups=config.unlocked_groups,
        precomputed=precomputed_towers(config),
        passages=1 if isinstance(model, CLIPConfig) else 1 + config.text_retrieval.hard_negatives,
        teacher=teacher,
        by_id=loss_fn.targets.by_id,
    )
    if not stores_most:
        return unresolved
    if memory_limit is None:
        raise ValueError("expected grad_cache.keep >= 0 on devices that do not report their memory, got -1")
    return store_activations(unresolved, int(SAFE_SHARE * memory_limit))
