"""Cached features of the frozen towers of a run."""

from collections.abc import Callable
from pathlib import Path

import jax
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from infcl_jax.data import FeatureStore, Source, TowerInput, cache_features, feature_key
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.models import TOWERS, build_model
from infcl_jax.run import precomputed_towers, read_model_config
from infcl_jax.runtime.mesh import to_host
from infcl_jax.runtime.processes import local_processes
from infcl_jax.settings import RunConfig
from infcl_jax.training import TrainState
from infcl_jax.training.frozen import frozen_encoder, tower_variables

FEATURES_FOLDER = "features"  # in the work directory
IN_WORKDIR = "workdir"  # value of cache_frozen


def cached_features(
    config: RunConfig,
    workdir: str | Path,
    mesh: Mesh,
    state: TrainState,
    source: Source,
    tokenizer: BaseTokenizer,
    say: Callable[[str], None],
) -> dict[str, FeatureStore]:
    """Compute and cache the features of frozen towers, if `cache_frozen` is set.

    All processes must call this function. As many rows per device are encoded at once as in a training step, so that
    the features have the same bits.

    Args:
      config: settings of the run.
      workdir: directory of the run.
      mesh: devices over which the batch is sharded.
      state: train state with the weights of the run.
      source: training data.
      tokenizer: tokenizer of the captions.
      say: function that gets lines of progress.

    Returns:
      Features by tower; none without `cache_frozen`.

    Raises:
      ValueError: see `precomputed_towers`.
    """
    towers = precomputed_towers(config)
    if not towers:
        return {}
    model = build_model(read_model_config(config))
    folder = Path(workdir) / FEATURES_FOLDER if config.cache_frozen == IN_WORKDIR else Path(config.cache_frozen)
    shard_rows = (config.grad_cache.chunk_size or config.batch_size) // mesh.size
    devices, stores = mesh.local_devices, {}
    for name in towers:
        variables = tower_variables(state.variables, name)
        variables = jax.device_get(variables) if jax.process_count() == 1 else to_host(variables)
        image_size = model.visual.image_size  # type: ignore[attr-defined]
        tower = TowerInput(name, image_size, tokenizer, config.max_image_pixels)
        facts = (getattr(model, TOWERS[name]), model.feature_dtype, model.image_mean, model.image_std)
        key = feature_key(source, tower, repr(facts), flatten_dict(variables, sep="/"))
        stores[name] = cache_features(
            source,
            tower,
            frozen_encoder(model.apply, variables, name, devices),
            shard_rows * len(devices),
            folder,
            key,
            threads=config.num_threads or max(1, usable_cores() // local_processes().cores),
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            say=say,
        )
        say(f"features of the frozen {name} tower: {len(source)} samples in {stores[name].folder}")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("cached features")
    return stores
