"""Settings of an existing run, and models of images and texts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from infcl_jax.models import CLIPConfig, TextPairConfig, build_model, model_config, variable_shapes
from infcl_jax.models.config import config_to_json
from infcl_jax.models.convert.api import read_config
from infcl_jax.models.convert.sources import open_source
from infcl_jax.models.registry import MODEL_FILE, change_config
from infcl_jax.runtime.file_io import replace_text
from infcl_jax.settings import (
    SETTINGS,
    AnyConfig,
    RunConfig,
    check_model_overrides,
    flattened,
    make_config,
    model_changes,
    precision_of_overrides,
    with_changes,
)
from infcl_jax.training import CHECKPOINTS, load_config, restore_variables
from infcl_jax.training.checkpoint_folder import step_of
from infcl_jax.training.restore import replicated_shapes

DEFAULT_MODEL = "tiny-shapes"


def saved_config(workdir: str | Path) -> RunConfig:
    """Return the settings of an existing run: the defaults, updated with `config.json`.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> config.batch_size
      32

    Args:
      workdir: directory of the run.

    Raises:
      FileNotFoundError: no run in `workdir`.
      ValueError: `config.json` is not JSON, or a setting is unknown or has the wrong type.
    """
    values = flattened(load_config(workdir))
    for name in values:
        if name not in SETTINGS:
            raise ValueError(f"expected a run of this version in {workdir}, got one with the setting {name}")
    before = {name: setting.before for name, setting in SETTINGS.items() if setting.resolved_once}
    try:
        overrides = SETTINGS["model_overrides"].check(values.get("model_overrides", ""))
        before |= precision_of_overrides(overrides)  # the precision of runs from before the setting
        config = with_changes(RunConfig(), before | values)
    except ValueError as error:
        raise ValueError(f"expected a run of this version in {workdir}, got another configuration: {error}") from error
    if (config.model is None or Path(config.model).name == MODEL_FILE) and (Path(workdir) / MODEL_FILE).is_file():
        return dataclasses.replace(config, model=str(Path(workdir) / MODEL_FILE))  # also of a run that has moved
    return config


def run_of(path: str) -> tuple[Path | None, int | None]:
    """Return work directory and step of the run or checkpoint at a path, else None."""
    folder = Path(path)
    if (folder / CHECKPOINTS).is_dir():
        return folder, None
    if folder.parent.name == CHECKPOINTS and (step := step_of(folder.name)) is not None:
        return folder.parents[1], step
    return None, None


def base_model(config: RunConfig) -> CLIPConfig:
    """Return the model configuration of a run without its overrides, by default of the weights `init.model`."""
    if config.model is not None or config.init.model is None:
        return model_config(config.model or DEFAULT_MODEL)
    workdir, _ = run_of(config.init.model)
    if workdir is not None:
        model = read_model_config(saved_config(workdir))
    else:
        model = read_config(open_source(config.init.model))
    return dataclasses.replace(model, dtype="float32", param_dtype="float32", feature_dtype=None)


def save_base_model(config: RunConfig, workdir: Path) -> None:
    """Write the model of `init.model` to the work directory, so that a resumed run does not read the weights again."""
    if config.model is None or Path(config.model).name == MODEL_FILE:
        content = json.dumps(config_to_json(base_model(config)), indent=2)
        replace_text(workdir / MODEL_FILE, content + "\n")


def read_model_config(config: AnyConfig) -> CLIPConfig:
    """Return the model configuration of a run, with its overrides.

    Examples:
      >>> config = infcl_jax.run.saved_config("runs/digits")
      >>> infcl_jax.run.read_model_config(config).embed_dim
      16

    Raises:
      ValueError: the model or an override is unknown, an override has the wrong type, or the model encodes queries and
        passages.
    """
    config = make_config(config)
    return overridden_model(config, base_model(config))


def overridden_model[C: (CLIPConfig, TextPairConfig)](config: RunConfig, base: C) -> C:
    """Return a model configuration with the precision and the overrides of a run."""
    overrides = model_changes(config.precision, config.model_overrides)
    check_model_overrides(base, overrides)
    if isinstance(base, TextPairConfig) and base.text.projection == "none" and "text.projection" not in overrides:
        overrides.setdefault("embed_dim", overrides.get("text.width", base.text.width))
    return change_config(base, **overrides)


def restored_model[C: CLIPConfig | TextPairConfig](
    config: C, workdir: Path, mesh: Mesh, step: int | None = None, dtype: str | None = None
) -> tuple[int, C, Any]:
    """Restore the variables of a checkpoint to evaluate, by default the latest one.

    Returns:
      The step, the configuration with `dtype` for activations and features, and the variables, a copy on each device.
    """
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype, feature_dtype=None)
    shapes = replicated_shapes(variable_shapes(build_model(config)), mesh)  # type: ignore[arg-type]
    restored, variables = restore_variables(workdir, shapes, step)
    return restored, config, variables
