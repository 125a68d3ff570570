"""Initial parameters of a run from pretrained weights, another run or a checkpoint."""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from infcl_jax.models import TOWERS, CLIPConfig, TextPairConfig, build_model, towers_of, variable_shapes
from infcl_jax.models.convert import bert, convert, inference_tower, open_source, resize_variables
from infcl_jax.models.convert.bert import weight_map
from infcl_jax.models.convert.sources import Source
from infcl_jax.models.convert.text_pair import check_architecture
from infcl_jax.models.convert.weight_map import flat_shapes, to_variables
from infcl_jax.models.registry import change_config
from infcl_jax.run.model import read_model_config, run_of, saved_config
from infcl_jax.runtime.console import say
from infcl_jax.settings import InitConfig
from infcl_jax.training import TrainState, restore_variables
from infcl_jax.training.state import initial_ema

_logger = logging.getLogger(__name__)

_SIZES = {"image_size", "context_length"}  # for which position embeddings are resized
_TOWER_FIELDS = {"image": "vision", "text": "text"}  # of `CLIPConfig`


def initialize(config: InitConfig, model: CLIPConfig, state: TrainState) -> TrainState:
    """Replace initial parameters and running statistics by pretrained weights, where moving averages start."""
    variables, matched = flatten_dict(state.variables, sep="/"), set()
    sources = {"": config.model, "image": config.image, "text": config.text}
    for tower, path in sources.items():
        if path is not None:
            targets = [name for name in variables if not tower or name.split("/")[1] == TOWERS[tower]]
            names, patterns = _source_names(config.rules, targets)
            matched |= patterns
            variables |= _loaded(path, variables, _read_variables(path, model, tower), names)
            say(f"initialized from {path}: {len(names)} of {len(targets)} tensors")
    unmatched = [pattern for pattern, _ in config.rules if pattern not in matched]
    if unmatched:
        raise ValueError(
            f"expected every rule of init.rules to match a parameter, got {unmatched[0]!r}, which does not"
        )
    return _with_variables(state, variables)


def initialize_pair(path: str, model: TextPairConfig, state: TrainState) -> TrainState:
    """Initialize both encoders from a BERT of Hugging Face, except for a projection."""
    source = open_bert(path, model)
    tied = flat_shapes(variable_shapes(build_model(dataclasses.replace(model, tied=True))))
    shapes = {name: shape for name, shape in tied.items() if "/text_projection/" not in name}
    tensors = source.tensors()
    arrays = flat_shapes(to_variables(weight_map(model.text, shapes, tensors), tensors, shapes, source.name))
    variables = flatten_dict(state.variables, sep="/")
    for subtree in set(towers_of(state.params).values()):
        names = {name.replace("params/text/", f"params/{subtree}/", 1): name for name in arrays}
        variables |= _loaded(path, variables, arrays, names)
    say(f"initialized both encoders from {path}: {len(arrays)} of {len(tied)} tensors of each")
    return _with_variables(state, variables)


def open_bert(path: str, model: TextPairConfig) -> Source:
    """Open a BERT of Hugging Face with the architecture of a model."""
    source = open_source(path)
    if source.config is None or source.format != "hf":
        raise ValueError(f"expected a BERT of Hugging Face with config.json in {path}, got another model")
    shortest = dataclasses.replace(model.text, context_length=1)  # any length is checked with the other fields
    check_architecture(model, bert.read_config(source.config, shortest), path)
    return source


def _with_variables(state: TrainState, variables: Mapping[str, Any]) -> TrainState:
    """Replace the variables of a state, at which its moving averages start."""
    state = state.replace(**unflatten_dict(variables, sep="/"))
    return state if state.ema_config is None else state.replace(ema=initial_ema(state.averaged))


def _source_names(rules: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Return the name in the source of each variable to load, and the patterns that matched."""
    names_in_source, matched = {}, set()
    for variable in names:
        collection, _, parameter = variable.partition("/")
        name = parameter
        for pattern, replacement in rules:
            if match := re.fullmatch(pattern, parameter):
                name = match.expand(replacement)
                matched.add(pattern)
                break
        if name:
            names_in_source[variable] = f"{collection}/{name}"
    return names_in_source, matched


def _read_variables(path: str, model: CLIPConfig, tower: str) -> dict[str, np.ndarray]:
    """Read the variables of weights, a run or a checkpoint, resized for a model of which one tower may be checked."""
    workdir, step = run_of(path)
    if workdir is not None:
        source = read_model_config(saved_config(workdir))
        template = variable_shapes(build_model(source))
        variables = restore_variables(workdir, template, step)[1]
    else:
        source, variables, checked = convert(open_source(path), default=model)
        _logger.info("%s", checked)
    _check_architecture(path, source, model, tower)
    sizes = {"vision.image_size": model.vision.image_size, "text.context_length": model.text.context_length}
    arrays = {name: np.asarray(array) for name, array in flatten_dict(variables, sep="/").items()}
    return resize_variables(arrays, source, change_config(source, **sizes))[0]


def _check_architecture(path: str, source: CLIPConfig, model: CLIPConfig, tower: str) -> None:
    """Check that the source's parameters mean the same in the model, such as with the same activation."""
    for name in (tower,) if tower else TOWERS:
        theirs, ours = (_meaning(config, _TOWER_FIELDS[name]) for config in (source, model))
        for key in theirs.keys() | ours.keys():
            if theirs.get(key) != ours.get(key):
                raise ValueError(
                    f"expected {key}={theirs.get(key)!r}, as in {path}, got {ours.get(key)!r}; set it in "
                    "model_overrides, or choose another model"
                )


def _meaning(config: CLIPConfig, field: str) -> dict[str, Any]:
    """Return the fields of a tower on which the meaning of its parameters depends."""
    tower = inference_tower(getattr(config, field), config.activation)
    values = {f"{field}.{f.name}": getattr(tower, f.name) for f in dataclasses.fields(tower) if f.name not in _SIZES}
    if field == "vision":
        values |= {"image_mean": config.image_mean, "image_std": config.image_std}
    return values | {f"the tower of {field}": type(tower).__name__}


def _loaded(
    path: str, current: Mapping[str, jax.Array], arrays: Mapping[str, np.ndarray], names: Mapping[str, str]
) -> dict[str, jax.Array]:
    """Place the arrays of a source like the current ones, in their dtypes."""
    missing = [name for name in names.values() if name not in arrays]
    if missing:
        raise ValueError(f"expected {missing[0]} in {path}, got none ({len(missing)} in all); skip it in init.rules")
    for target, name in names.items():
        if arrays[name].shape != current[target].shape:
            raise ValueError(
                f"expected {target} {list(current[target].shape)}, got {list(arrays[name].shape)} in {path}; "
                "skip it in init.rules, or choose another model"
            )
    return {
        target: jax.device_put(arrays[name].astype(current[target].dtype), current[target].sharding)
        for target, name in names.items()
    }
