"""Training data of a run and the batches of its steps."""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.data import (
    BadRecordError,
    FeatureStore,
    Source,
    Tokenizer,
    TrainIterator,
    check_deterministic,
    load_source,
    train_iterator,
)
from infcl_jax.data.decode import choose_decoder
from infcl_jax.data.decode.nvimgcodec import NvImageCodecDecoder, open_decoders
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.sources.text_retrieval import QuerySource
from infcl_jax.data.teacher_inputs import TeacherFeatures, TeacherTokens
from infcl_jax.losses.distilled import TEACHER_INPUTS
from infcl_jax.models import text_pair_config
from infcl_jax.ops.color import ColorBatch, with_colors
from infcl_jax.run.model import read_model_config, text_tokenizer
from infcl_jax.run.text_retrieval import BATCH, pair_data
from infcl_jax.runtime.mesh import data_mesh, shard_batch
from infcl_jax.runtime.processes import local_processes
from infcl_jax.settings import AnyConfig, RunConfig, make_config
from infcl_jax.training import loss_class, replayed
from infcl_jax.training.frozen import PrecomputedFeatures

_logger = logging.getLogger(__name__)

_PREFETCHED = 1  # decoded batches that wait in the memory of the devices


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
    config = make_config(config)
    if text_pair_config(config.model) is not None:
        return cast(Source, QuerySource(config.dataset, config.split))
    return load_source(config.dataset, config.split, config.data_dir)


def sample_source(config: AnyConfig) -> Source | None:
    """Load the training data if the state or the length of the run depends on its size.

    Raises:
      ValueError, FileNotFoundError: the loss is unknown, or see `infcl_jax.data.load_source`.
    """
    config = make_config(config)
    return training_source(config) if loss_takes(config, "samples") or config.epochs is not None else None


def loss_takes(config: RunConfig, name: str) -> bool:
    """Return whether the loss takes an input, such as "samples" or "index"."""
    return name in loss_class(config.loss).inputs


def num_samples(config: RunConfig, source: Source | None) -> int:
    """Count the samples in the sample state; 0 for losses without it."""
    if not loss_takes(config, "samples"):
        return 0
    if source is None:
        raise ValueError(f"expected a source with loss {config.loss!r}, got None; pass training_source(config)")
    return len(source)


def training_data(
    config: AnyConfig,
    source: Source,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    features: Mapping[str, FeatureStore] | None = None,
    teacher: TeacherTokens | TeacherFeatures | None = None,
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
      features: features of frozen towers, from `infcl_jax.run.frozen_features.cached_features`.
      teacher: tokens or cached features of a teacher, from `infcl_jax.run.teacher.Teacher.inputs`.

    Raises:
      ValueError, FileNotFoundError: `decode` is not possible, or see `infcl_jax.data.train_iterator`.
    """
    config = make_config(config)
    if isinstance(source, QuerySource):
        return pair_data(config, source, tokenizer or text_tokenizer(config))
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
        augmentation=config.augmentation,
        decoders=decoders,
        sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        features=features,
        positives=config.positives,
        teacher=teacher,
    )


def precomputed_towers(config: RunConfig) -> tuple[str, ...]:
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
        check_deterministic(config.augmentation)
    return towers


def _device_decoders(config: RunConfig, source: Source, mesh: Mesh) -> dict[jax.Device, NvImageCodecDecoder] | None:
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


def batch_shapes(config: RunConfig, mesh: Mesh, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the shape, dtype and sharding of each array of `next_batch`.

    None if the batch is not in device memory, or if it has more than images, texts, sample indices and ids.
    """
    if config.grad_cache.residency != "device" or text_pair_config(config.model) is not None:
        return None
    if precomputed_towers(config) or config.distill.teacher is not None:
        return None
    side, rows = read_model_config(config).vision.image_size, config.batch_size
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)

    image = array(np.uint8, side, side, 3)
    if config.augmentation.adjusts_colors:
        image = ColorBatch(image, array(np.float32, 7))
    shapes = {"image": image, "text": array(np.int32, tokenizer.context_length)}
    if loss_takes(config, "index"):
        shapes["index"] = array(np.int32)
    if config.positives != "pair":
        shapes["ids"] = array(np.int32, 2)
    return shapes


def next_batch(config: AnyConfig, data: TrainIterator, mesh: Mesh) -> dict[str, Any]:
    """Return the batch of the next step in the memory that `grad_cache.residency` names.

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
    config = make_config(config)
    cache, precomputed = config.grad_cache, precomputed_towers(config)
    if cache.residency == "replay":
        return replayed(data.next_reader(), cache.chunk_size, mesh, precomputed)
    batch = next(data)
    if text_pair_config(config.model) is not None:
        texts = {name: batch[name] for name in BATCH}
        return texts if cache.residency == "host" else {name: shard_batch(mesh, array) for name, array in texts.items()}
    pairs = {"image": with_colors(batch), "text": batch["text"]}
    pairs |= {name: PrecomputedFeatures(batch[name]) for name in precomputed}
    if loss_takes(config, "index"):
        pairs["index"] = batch["index"].astype(np.int32)
    if config.positives != "pair":
        pairs["ids"] = batch["ids"]
    pairs |= {name: batch[name] for name in TEACHER_INPUTS if name in batch}
    if cache.residency == "host":
        return pairs
    return jax.tree.map(lambda array: array if isinstance(array, jax.Array) else shard_batch(mesh, array), pairs)
