"""Builders of a run from its configuration, see `docs/settings.md`."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from infcl_jax.checks import check_choice
from infcl_jax.data import Augmentation, ByteTokenizer, Source, TrainIterator, load_source, train_iterator
from infcl_jax.distributed import shard_batch
from infcl_jax.evaluation import EvaluationConfig, Suite
from infcl_jax.losses.global_contrastive import VARIANTS
from infcl_jax.models import CLIPConfig, build_model, model_config
from infcl_jax.ops.pairwise_lse.implementations import best_implementation
from infcl_jax.planner import Workload, keep_most, tree_bytes
from infcl_jax.settings import check_model_overrides, parse_overrides
from infcl_jax.training import (
    GlobalContrastive,
    GlobalContrastiveConfig,
    OptimizerConfig,
    TrainState,
    create_state,
    initial_samples,
    make_loss,
    make_optimizer,
    replayed,
)
from infcl_jax.training.step import LOSSES, LossFn

_KEEP_MOST = -1  # value of grad_cache.keep: store as many chunks as fit
_PLANNED_SHARE = 0.95  # of the memory; plans are within 5 % of what runs use (docs/benchmarks.md)


def read_model_config(config: ConfigDict) -> CLIPConfig:
    """Return the model configuration of a run, with its overrides.

    Raises:
      ValueError: the model or an override is unknown, an override has the wrong type, or the vocabulary is too small
        for the tokenizer.
    """
    overrides = parse_overrides(config.model_overrides)
    check_model_overrides(model_config(config.model), overrides)
    model = model_config(config.model, **overrides)
    needed = ByteTokenizer().vocab_size
    if model.text.vocab_size < needed:
        raise ValueError(f"expected text.vocab_size >= {needed} (bytes and marks), got {model.text.vocab_size}")
    return model


def evaluation_suite(config: ConfigDict, mesh: Mesh) -> Suite:
    """Create the evaluation suite of a run.

    Raises:
      ValueError, FileNotFoundError: see `infcl_jax.evaluation.Suite`.
    """
    model = read_model_config(config)
    return Suite(
        EvaluationConfig(**config.evaluation),
        build_model(model),
        ByteTokenizer(model.text.context_length),
        image_size=model.vision.image_size,
        data_dir=config.data_dir,
        mesh=mesh,
        implementation=config.implementation,
        train_batch_size=config.batch_size if config.loss == "clip" else None,
    )


def _training_source(config: ConfigDict) -> Source:
    return load_source(config.dataset, config.split, config.data_dir)


def training_data(config: ConfigDict) -> TrainIterator:
    """Create the endless iterator over this process's share of the training batches.

    Raises:
      ValueError, FileNotFoundError: see `infcl_jax.data.train_iterator`.
    """
    model = read_model_config(config)
    return train_iterator(
        _training_source(config),
        tokenizer=ByteTokenizer(model.text.context_length),
        image_size=model.vision.image_size,
        batch_size=config.batch_size,
        seed=config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        num_workers=config.num_workers,
        augmentation=Augmentation(**config.augmentation),
    )


def loss(config: ConfigDict, mesh: Mesh) -> LossFn | GlobalContrastive:
    """Create the loss of a run.

    Raises:
      ValueError: the loss or the implementation is unknown, or a setting is wrong.
    """
    settings = GlobalContrastiveConfig(**config.global_contrastive)
    check_choice("loss", config.loss, (*LOSSES, *VARIANTS))
    if config.loss not in VARIANTS:
        return make_loss(config.loss, mesh, config.implementation)
    return GlobalContrastive(
        variant=config.loss,
        config=settings,
        steps_per_epoch=len(_training_source(config)) // config.batch_size,
        mesh=mesh,
        implementation=config.implementation,
        optimizer=OptimizerConfig(**config.optimizer),
    )


def next_batch(config: ConfigDict, data: TrainIterator, mesh: Mesh) -> dict[str, Any]:
    """Return the batch of the next step, placed as `config.grad_cache.residency` says.

    Returns:
      Images, texts and, for global losses, int32 sample indices: arrays on the devices or the host, or `Replay`.
    """
    cache = config.grad_cache
    if cache.residency == "replay":
        return replayed(data.next_reader(), cache.chunk_size, mesh)
    batch = next(data)
    pairs = {"image": batch["image"], "text": batch["text"]}
    if config.loss in VARIANTS:
        pairs["index"] = batch["index"].astype(np.int32)
    return pairs if cache.residency == "host" else shard_batch(mesh, pairs)


def initial_state(config: ConfigDict, mesh: Mesh) -> TrainState:
    """Initialize parameters, optimizer state and sample state on the devices.

    The sample state of global losses is sharded over the devices.
    """
    model = read_model_config(config)
    optimizer = make_optimizer(OptimizerConfig(**config.optimizer), config.total_steps)
    sizes = model.vision.image_size, model.text.context_length
    state = create_state(
        build_model(model),
        optimizer,
        *sizes,
        config.seed,
        mesh,
        parameter_sharding=config.parameter_sharding,
        frozen=config.frozen,
    )
    if config.loss not in VARIANTS:
        return state
    samples = initial_samples(config.loss, len(_training_source(config)), model.init_logit_scale, mesh)
    return state.replace(samples=samples)


def check_chunk_size(config: ConfigDict) -> None:
    """Check that the gradient-cache chunk is no larger than the batch.

    Raises:
      ValueError: the chunk is larger than the batch.
    """
    chunk_size = config.grad_cache.chunk_size
    if chunk_size is not None and chunk_size > config.batch_size:
        raise ValueError(
            f"expected grad_cache.chunk_size <= batch_size={config.batch_size}, got {chunk_size}; choose a smaller "
            "chunk, or None for no gradient caching"
        )


def with_most_kept(
    config: ConfigDict, devices: int, memory: int | None, implementation: str | None = None
) -> ConfigDict:
    """Resolve `grad_cache.keep = -1` to the largest setting that fits into memory.

    A configuration with another value is returned as it is.

    Args:
      config: settings of the run.
      devices: number of devices that share the batch.
      memory: bytes per device that JAX may use.
      implementation: implementation of the CLIP loss if the configuration names none; None: the best on this device.

    Raises:
      ValueError: there are no chunks, or the memory is unknown.
    """
    if config.grad_cache.keep != _KEEP_MOST:
        return config
    if memory is None:
        raise ValueError("expected grad_cache.keep >= 0 on devices that do not tell their memory, got -1")
    config = config.copy_and_resolve_references()
    config.grad_cache.keep = 0
    most = keep_most(workload(config, devices, implementation), int(_PLANNED_SHARE * memory))
    config.grad_cache.update(keep=most.keep, keep_residual=most.keep_residual)
    return config


def workload(config: ConfigDict, devices: int, implementation: str | None = None) -> Workload:
    """Return the memory-relevant settings of a run, for `infcl_jax.planner`.

    Args:
      config: settings of the run.
      devices: number of devices that share the batch.
      implementation: implementation of the CLIP loss if the configuration names none; None: the best on this device.

    Raises:
      ValueError: a setting is wrong.
    """
    check_chunk_size(config)
    model, is_global = read_model_config(config), config.loss in VARIANTS
    samples = None
    if is_global:
        arguments = config.loss, len(_training_source(config)), model.init_logit_scale
        samples = jax.eval_shape(lambda: initial_samples(*arguments))
    chosen = config.implementation or ("xla" if config.loss == "siglip" else implementation or best_implementation())
    return Workload(
        model=model,
        optimizer=make_optimizer(OptimizerConfig(**config.optimizer), config.total_steps),
        batch_size=config.batch_size,
        devices=devices,
        implementation=chosen,
        loss="clip" if is_global else config.loss,
        sample_bytes=tree_bytes(samples) // devices,
        parameter_sharding=config.parameter_sharding,
        frozen=config.frozen,
        **config.grad_cache,
    )
