"""Parts of a run, built from its configuration (see `docs/settings.md`)."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from infcl_jax.checks import check_choice
from infcl_jax.data import (
    Augmentation,
    BadRecordError,
    FeatureStore,
    Source,
    Tokenizer,
    TrainIterator,
    check_deterministic,
    check_vocabulary,
    load_source,
    load_tokenizer,
    train_iterator,
)
from infcl_jax.data.decode import choose_decoder
from infcl_jax.data.decode.nvimgcodec import NvImageCodecDecoder, open_decoders
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer
from infcl_jax.data.tokenizers.clip_vocabulary import CLIP_VOCAB_SIZE
from infcl_jax.data.transforms import RESIZE_MODES, Resize
from infcl_jax.distributed import data_mesh, flat_mesh, local_processes, shard_batch
from infcl_jax.evaluation import EvaluationConfig, Suite
from infcl_jax.losses import Loss
from infcl_jax.models import BertConfig, CLIPConfig, TextConfig, build_model, model_config
from infcl_jax.ops.color import with_colors
from infcl_jax.ops.pairwise_lse.implementations import best_implementation
from infcl_jax.planner import SAFE_SHARE, Workload, store_activations, tree_bytes
from infcl_jax.planner.activations import parameter_shapes
from infcl_jax.settings import SETTINGS, check_model_overrides, default_config, flattened, parse_overrides, total_steps
from infcl_jax.settings.consistency import ema_config
from infcl_jax.training import (
    GlobalContrastiveConfig,
    GradCacheConfig,
    OptimizerConfig,
    TrainState,
    UnlockedGroups,
    check_optimizer,
    create_state,
    load_config,
    loss_class,
    make_loss,
    make_optimizer,
    replayed,
)
from infcl_jax.training.frozen import PrecomputedFeatures

TOKENIZER_FOLDER = "tokenizer"  # of the run's vocabulary, in the work directory

_logger = logging.getLogger(__name__)

_PREFETCHED = 1  # decoded batches that wait in the memory of the devices
_STORE_MOST = -1  # value of grad_cache.keep: store as many activations as fit


def saved_config(workdir: str | Path) -> ConfigDict:
    """Return the settings of an existing run: the defaults, updated with `config.json`.

    Args:
      workdir: directory of the run.

    Raises:
      FileNotFoundError: no run in `workdir`.
      ValueError: `config.json` is not JSON, or a setting is unknown or has the wrong type.
    """
    config, values = default_config(), flattened(ConfigDict(load_config(workdir)))
    for name in values:
        if name not in SETTINGS:
            raise ValueError(f"expected a run of this version in {workdir}, got one with the setting {name}")
    try:
        config.update_from_flattened_dict(values)
    except TypeError as error:
        raise ValueError(f"expected a run of this version in {workdir}, got another configuration: {error}") from error
    return config


def read_model_config(config: ConfigDict) -> CLIPConfig:
    """Return the model configuration of a run, with its overrides.

    Raises:
      ValueError: the model or an override is unknown, or an override has the wrong type.
    """
    overrides = parse_overrides(config.model_overrides)
    check_model_overrides(model_config(config.model), overrides)
    return model_config(config.model, **overrides)


def image_resize(model: CLIPConfig) -> Resize:
    """Return the resize of a model's images in evaluations.

    Raises:
      ValueError: the resize is not supported.
    """
    check_choice("resize_mode", model.resize_mode, RESIZE_MODES)
    return Resize(model.resize_mode, model.interpolation)


def text_tokenizer(config: ConfigDict, workdir: str | Path | None = None) -> BaseTokenizer:
    """Load the tokenizer of a run and check that it fits the model.

    Args:
      config: settings of the run.
      workdir: directory of an existing run, whose copy of the vocabulary is read if it has one.

    Raises:
      ValueError: the tokenizer is unknown, its vocabulary is missing, or it does not fit the model.
      ImportError: a package is missing, such as open_clip_torch with CLIP's vocabulary.
    """
    text, default = read_model_config(config).text, model_config(config.model).text
    spec = config.tokenizer or {CLIP_VOCAB_SIZE: "clip", ByteTokenizer.vocab_size: "bytes"}.get(default.vocab_size)
    if workdir is not None and (copy := Path(workdir) / TOKENIZER_FOLDER).is_dir():
        spec = str(copy)
    if spec is None:
        raise ValueError(
            f"expected a tokenizer for the {default.vocab_size} token ids of the model {config.model!r}, got None; "
            "set tokenizer"
        )
    tokenizer = load_tokenizer(spec, text.context_length, clean=config.text_cleaning)
    end_token = text.end_token if isinstance(text, TextConfig) and text.pool == "end" else tokenizer.end_id
    check_vocabulary(tokenizer, text.vocab_size, end_token)
    if isinstance(text, BertConfig) and text.pad_id != tokenizer.pad_id:
        raise ValueError(
            f"expected text.pad_id={tokenizer.pad_id}, as in the tokenizer {tokenizer.kind!r}, got {text.pad_id}; "
            "set it in model_overrides, or choose another tokenizer"
        )
    return tokenizer


def evaluation_suite(
    config: ConfigDict,
    mesh: Mesh,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Suite:
    """Create the evaluation suite of a run.

    Args:
      config: settings of the run.
      mesh: devices.
      tokenizer: tokenizer of captions and prompts; None: `text_tokenizer(config)`.
      say: function that prints a line of progress; None: no progress.
      check: function called before each batch and task, which may raise to end an evaluation; None: none.

    Raises:
      ValueError, FileNotFoundError: see `infcl_jax.evaluation.Suite`.
    """
    model = read_model_config(config)
    return Suite(
        EvaluationConfig(**config.evaluation),
        build_model(model),
        tokenizer or text_tokenizer(config),
        image_size=model.vision.image_size,
        data_dir=config.data_dir,
        mesh=flat_mesh(mesh),
        implementation=config.implementation,
        train_batch_size=config.batch_size if config.loss == "clip" else None,
        evaluations=config.evaluations,
        resize=image_resize(model),
        say=say,
        check=check,
        max_bad_records=config.max_bad_records,
        max_image_pixels=config.max_image_pixels,
    )


def training_source(config: ConfigDict) -> Source:
    """Load the training data of a run, for `loss`, `training_data`, `initial_state` and `workload`.

    Raises:
      ValueError, FileNotFoundError: see `infcl_jax.data.load_source`.
    """
    return load_source(config.dataset, config.split, config.data_dir)


def sample_source(config: ConfigDict) -> Source | None:
    """Load the training data if the state or the length of the run depends on its size.

    Raises:
      ValueError, FileNotFoundError: the loss is unknown, or see `infcl_jax.data.load_source`.
    """
    return training_source(config) if _loss_takes(config, "samples") or config.epochs is not None else None


def _loss_takes(config: ConfigDict, name: str) -> bool:
    """Return whether the loss takes an input, such as "samples" or "index"."""
    return name in loss_class(config.loss).inputs


def _num_samples(config: ConfigDict, source: Source | None) -> int:
    """Count the samples in the sample state; 0 for losses without it."""
    if not _loss_takes(config, "samples"):
        return 0
    if source is None:
        raise ValueError(f"expected a source with loss {config.loss!r}, got None; pass training_source(config)")
    return len(source)


def training_data(
    config: ConfigDict,
    source: Source,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    features: Mapping[str, FeatureStore] | None = None,
) -> TrainIterator:
    """Create the endless iterator over this process's rows of training batches.

    Args:
      config: settings of the run.
      source: training data.
      tokenizer: tokenizer of the captions; None: `text_tokenizer(config)`.
      mesh: devices over which the batch is sharded; None: all.
      features: features of frozen towers, from `infcl_jax.frozen_features.cached_features`.

    Raises:
      ValueError, FileNotFoundError: `decode` is not possible, or see `infcl_jax.data.train_iterator`.
    """
    mesh = data_mesh() if mesh is None else mesh
    decoders = None if features and "image" in features else _device_decoders(config, source, mesh)
    local = local_processes()
    return train_iterator(
        source,
        tokenizer=tokenizer or text_tokenizer(config),
        image_size=read_model_config(config).vision.image_size,
        batch_size=config.batch_size,
        seed=config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        num_workers=config.num_workers,
        max_bad_records=config.max_bad_records,
        max_image_pixels=config.max_image_pixels,
        num_threads=config.num_threads,
        prefetch_batches=config.prefetch_batches if decoders is None else _PREFETCHED,
        cores=max(1, usable_cores() // local.cores),
        processes_per_host=local.host,
        augmentation=Augmentation(**config.augmentation),
        decoders=decoders,
        sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        features=features,
    )


def precomputed_towers(config: ConfigDict) -> tuple[str, ...]:
    """List the frozen towers whose features are cached.

    Raises:
      ValueError: `cache_frozen` is set without a frozen tower, or the images are augmented at random.
    """
    if config.cache_frozen is None:
        return ()
    towers = tuple(name for name in config.frozen if not config.unlocked_groups[name])
    if not towers:
        raise ValueError(
            f"expected a frozen tower without unlocked groups with cache_frozen={config.cache_frozen!r}, got "
            f"frozen={config.frozen}; freeze one, or set cache_frozen to None"
        )
    if "image" in towers:
        check_deterministic(Augmentation(**config.augmentation))
    return towers


def _device_decoders(config: ConfigDict, source: Source, mesh: Mesh) -> dict[jax.Device, NvImageCodecDecoder] | None:
    """Create the decoder of each device of this process; None if the host decodes."""
    if choose_decoder(config.decode, config.grad_cache.residency) == "pillow":
        return None
    with contextlib.suppress(BadRecordError):
        if not isinstance(source[0]["image"], bytes):
            return None
    size = read_model_config(config).vision.image_size
    try:
        return open_decoders(mesh.local_devices, config.batch_size // mesh.size, size)
    except ValueError as error:
        if config.decode == "nvimgcodec":
            raise
        _logger.warning("the host decodes images: %s", error)
        return None


def loss(config: ConfigDict, mesh: Mesh | None, source: Source | None = None) -> Loss:
    """Create the loss of a run.

    Args:
      config: settings of the run.
      mesh: devices over which the batch is sharded; None: one device.
      source: training data; None is enough for losses without sample state.

    Raises:
      ValueError: the loss or the implementation is unknown, or a setting is wrong.
    """
    return make_loss(
        config.loss,
        mesh,
        config.implementation,
        config=GlobalContrastiveConfig(**config.global_contrastive),
        # A batch larger than the dataset is an error of `training_data`, which names both sizes.
        steps_per_epoch=max(1, _num_samples(config, source) // config.batch_size),
        optimizer=OptimizerConfig(**config.optimizer),
    )


def next_batch(config: ConfigDict, data: TrainIterator, mesh: Mesh) -> dict[str, Any]:
    """Return the batch of the next step in the memory that `grad_cache.residency` names.

    Returns:
      "image" (`ColorBatch` if colors are augmented), "text" and, for losses with sample state, "index" (int32 sample
      indices). Towers with cached features have `PrecomputedFeatures`. The values are global arrays on the devices,
      this process's NumPy arrays, or `Replay`.
    """
    cache, precomputed = config.grad_cache, precomputed_towers(config)
    if cache.residency == "replay":
        return replayed(data.next_reader(), cache.chunk_size, mesh, precomputed)
    batch = next(data)
    pairs = {"image": with_colors(batch), "text": batch["text"]}
    pairs |= {name: PrecomputedFeatures(batch[name]) for name in precomputed}
    if _loss_takes(config, "index"):
        pairs["index"] = batch["index"].astype(np.int32)
    if cache.residency == "host":
        return pairs
    return jax.tree.map(lambda array: array if isinstance(array, jax.Array) else shard_batch(mesh, array), pairs)


def _optimizer(config: ConfigDict, source: Source | None) -> optax.GradientTransformation:
    """Create the optimizer of a run, and check that its rules fit the model."""
    settings = OptimizerConfig(**config.optimizer)
    check_optimizer(settings, parameter_shapes(build_model(read_model_config(config))))
    return make_optimizer(settings, total_steps(config, source))


def initial_state(config: ConfigDict, mesh: Mesh, source: Source | None = None) -> TrainState:
    """Initialize parameters, moving averages, optimizer state and sample state on the devices.

    The sample state is sharded over the devices.

    Args:
      config: settings of the run.
      mesh: devices that hold the state.
      source: training data; None is enough for losses without sample state and runs without `epochs`.

    Raises:
      ValueError: a setting is wrong, or a rule of the optimizer matches no parameter.
    """
    model = read_model_config(config)
    sizes = model.vision.image_size, model.text.context_length
    state = create_state(
        build_model(model),
        _optimizer(config, source),
        *sizes,
        config.seed,
        mesh,
        parameter_sharding=config.parameter_sharding,
        frozen=config.frozen,
        unlocked_groups=UnlockedGroups(**config.unlocked_groups),
        ema=ema_config(config),
    )
    samples = loss(config, mesh, source).init_samples(_num_samples(config, source), model.init_logit_scale)
    return state.replace(samples=samples)


def workload(
    config: ConfigDict,
    devices: int,
    memory_limit: int | None = None,
    implementation: str | None = None,
    source: Source | None = None,
) -> Workload:
    """Return the settings of a run that determine its memory, for `infcl_jax.planner`.

    `grad_cache.keep = -1` becomes the number of stored chunks that fits, see `store_activations`.

    Args:
      config: settings of the run.
      devices: number of devices over which the batch is sharded.
      memory_limit: bytes that JAX may use on a device; None if unknown.
      implementation: implementation of the loss if the configuration names none; None: the best on this device.
      source: training data; None is enough for losses without sample state and runs without `epochs`.

    Raises:
      ValueError: a setting is wrong, or `grad_cache.keep` is -1 without chunks or a memory limit.
    """
    model, loss_fn = read_model_config(config), loss(config, None, source)
    sizes = _num_samples(config, source), model.init_logit_scale
    samples = jax.eval_shape(lambda: loss_fn.init_samples(*sizes))
    best = implementation or best_implementation()
    chosen = config.implementation or (best if best in loss_fn.implementations else "xla")
    cache = dict(config.grad_cache)
    if stores_most := cache["keep"] == _STORE_MOST:
        cache["keep"] = 0
    unresolved = Workload(
        model=model,
        optimizer=_optimizer(config, source),
        batch_size=config.batch_size,
        devices=devices,
        cache=GradCacheConfig(**cache),
        implementation=chosen,
        loss=config.loss,
        ema=ema_config(config) is not None,
        sample_bytes=tree_bytes(samples) // devices,
        parameter_sharding=config.parameter_sharding,
        frozen=config.frozen,
        unlocked_groups=UnlockedGroups(**config.unlocked_groups),
        precomputed=precomputed_towers(config),
    )
    if not stores_most:
        return unresolved
    if memory_limit is None:
        raise ValueError("expected grad_cache.keep >= 0 on devices that do not report their memory, got -1")
    return store_activations(unresolved, int(SAFE_SHARE * memory_limit))
