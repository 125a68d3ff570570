"""Conversion of pretrained models to this library and back."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from infcl_jax.models.clip import CLIP, variable_shapes
from infcl_jax.models.config import CLIPConfig
from infcl_jax.models.convert import hugging_face, open_clip, open_clip_files
from infcl_jax.models.convert.position_embeddings import resize_positions
from infcl_jax.models.convert.reference import difference_from_reference, summary
from infcl_jax.models.convert.sources import Source, open_source
from infcl_jax.models.convert.tensor_files import Tensors, write_tensors
from infcl_jax.models.convert.weight_map import flat_shapes, to_tensors, to_variables
from infcl_jax.models.open_clip_config import CONFIG_FILE, read_open_clip_config
from infcl_jax.models.registry import build_model, change_config, config_of, model_config
from infcl_jax.ops.common.checks import check_choice

ExportFormat = Literal["open_clip", "hf"]

_logger = logging.getLogger(__name__)


def load_pretrained(
    path: str | Path,
    *,
    model: str | None = None,
    image_size: int | None = None,
    context_length: int | None = None,
    compare_features: bool = True,
    **overrides: Any,
) -> tuple[CLIP, dict[str, Any]]:
    """Load a model with its weights from OpenCLIP or Hugging Face.

    Every parameter must have its tensors. One line of the log says what was checked: tensors without a parameter, such
    as masks, resized position embeddings, and whether the variables, converted back, equal the tensors bit for bit.

    Args:
      path: a local folder, or `hf-hub:OWNER/NAME[@REVISION]`, with the files of OpenCLIP (`open_clip_config.json`,
        `open_clip_model.safetensors`) or of a CLIP or SigLIP model of transformers (`config.json`,
        `model.safetensors`). Also a file of weights in such a folder, or one without a configuration, or a model of
        OpenCLIP with its pretrained tag, such as "ViT-B-32:laion2b_s34b_b79k", which is a repository on the Hub.
      model: name or OpenCLIP configuration of a file without one, see `infcl_jax.models.model_config`.
      image_size: height and width of the images in pixels; the position embeddings are resized as in OpenCLIP. None:
        that of the model.
      context_length: tokens per text; the position embeddings are resized as in OpenCLIP. None: the model's.
      compare_features: whether the line also has the largest difference of normalized features from
        `open_clip` or `transformers`, where it is installed with PyTorch.
      **overrides: further changes to the configuration, see `infcl_jax.models.model_config`. `param_dtype` casts the
        weights. By default, it is their dtype, or float32 for mixed ones.

    Returns:
      The model, and its variables as NumPy arrays. Those of a ResNet of OpenCLIP have a collection "counters", which
        `save_pretrained` writes back.

    Raises:
      FileNotFoundError: no such folder or Hub repository, or a file is missing or cannot be fetched.
      ValueError: the configuration is not supported, or a tensor is missing, unknown or of another shape.
      ImportError: `huggingface_hub` is not installed (extra "hub").

    Examples:
      >>> checked = save_pretrained("exported", model, variables)
      >>> loaded, variables = load_pretrained("exported")  # or "hf-hub:laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
      >>> encode = jax.jit(lambda variables, pixels: loaded.apply(variables, pixels, method="encode_image"))
      >>> encode(variables, pixels).shape
      (8, 16)
    """
    sizes = {"vision.image_size": image_size, "text.context_length": context_length}
    changes = {name: size for name, size in sizes.items() if size is not None} | overrides
    source = open_source(path)
    config, variables, checked = convert(source, changes, default_config(source, model))
    if compare_features and not changes:
        checked += difference_from_reference(source, build_model(config), variables)
    _logger.info("%s", checked)
    return build_model(config), variables


def save_pretrained(
    path: str | Path,
    model: CLIP | CLIPConfig,
    variables: Any,
    format: ExportFormat = "open_clip",
    *,
    compare_features: bool = True,
) -> str:
    """Write a model for OpenCLIP or Hugging Face.

    Examples:
      >>> save_pretrained("saved", model, variables)
      'saved (open_clip): ... tensors match ... parameters; converted back they are equal'

    Args:
      path: folder, created if missing.
      model: the model, or its configuration, which also has the preprocessing of images.
      variables: its variables.
      format: "open_clip": files for `open_clip.create_model_and_transforms("local-dir:PATH")`. "hf": files for
        `transformers.AutoModel.from_pretrained(PATH)`.
      compare_features: whether the line also has the largest difference of normalized features from
        `open_clip` or `transformers`, where it is installed with PyTorch.

    Returns:
      One line on the files, read and converted back, see `load_pretrained`.

    Raises:
      ValueError: the format has no such model.
    """
    check_choice("format", format, get_args(ExportFormat))
    config, arrays = config_of(model) if isinstance(model, CLIP) else model, flat_shapes(jax.device_get(variables))
    counters = {path: np.asarray(arrays[path], np.int64) for path in arrays if open_clip.is_counter(path)}
    arrays |= counters  # on devices they are int32
    if format == "open_clip":
        names = ("text.",) if open_clip.needs_custom_text(config) else ()
        weights, weight_file = open_clip.weight_map(config, arrays, names), open_clip.WEIGHT_FILES[0]
        files = open_clip_files.export_files(config)
    else:
        weights, weight_file = hugging_face.weight_map(config, arrays, ()), hugging_face.WEIGHT_FILES[0]
        files = hugging_face.export_files(config)
    write_model(folder := Path(path), files, weight_file, to_tensors(weights, arrays))
    source = open_source(folder)
    _, converted, checked = convert(source)
    check_export(folder, arrays, converted, config.param_dtype)
    if compare_features:
        checked += difference_from_reference(source, build_model(config), variables)
    return checked


def write_model(folder: Path, files: Mapping[str, Any], weight_file: str, tensors: Tensors) -> None:
    """Write the JSON files and the weights of a model; the folder is created if missing."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    write_tensors(folder / weight_file, tensors)


def check_export(folder: Path, arrays: Mapping[str, Any], converted: Any, dtype: str) -> None:
    """Raise `ValueError` unless an export, read and converted back, equals the arrays bit for bit."""
    back = flat_shapes(converted)
    if any(np.asarray(array).tobytes() != back[path].tobytes() for path, array in arrays.items()):
        raise ValueError(f"expected the export in {folder} to hold the variables in {dtype}, got others")


def convert(
    source: Source, overrides: Mapping[str, Any] | None = None, default: CLIPConfig | None = None
) -> tuple[CLIPConfig, dict[str, Any], str]:
    """Convert the tensors of a source to variables.

    The configuration of the source, or `default`, is changed by `overrides`.

    Returns:
      Configuration, variables and one line that says what was checked, see `load_pretrained`.
    """
    tensors = source.tensors()
    original = change_config(read_config(source, default), param_dtype=_common_dtype(tensors))
    config = change_config(original, **(overrides or {}))
    if source.format == "open_clip" and (reason := open_clip.wrong_activation(config, tensors, Path(source.name).name)):
        _logger.warning(
            "expected a model with QuickGELU for the weights of %s (%s), got one without: its features differ from the "
            "original; choose its name with -quickgelu, such as ViT-B-32-quickgelu, or set quick_gelu in %s",
            *(source.name, reason, CONFIG_FILE),
        )
    shapes = flat_shapes(variable_shapes(build_model(original))) | open_clip.read_counters(tensors)
    names = open_clip if source.format == "open_clip" else hugging_face
    weights = names.weight_map(original, shapes, tensors)
    arrays = flat_shapes(to_variables(weights, tensors, shapes, source.name))
    arrays, resized = resize_variables(arrays, original, config)
    checked = summary(
        source.name,
        source.format,
        len(weights.names()),
        len(arrays),
        unused=tensors.keys() - weights.names(),
        resized=resized,
        equal=all(
            array.tobytes() == tensors[name].astype(array.dtype).tobytes()
            for name, array in to_tensors(weights.without(resized), arrays).items()
        ),
    )
    return config, unflatten_dict(arrays, sep="/"), checked


def resize_variables(
    arrays: Mapping[str, np.ndarray], original: CLIPConfig, config: CLIPConfig
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Resize position embeddings of variables by path from `original` to `config`, and cast to its dtypes.

    Returns:
      The variables by path, and the paths of the resized ones.

    Raises:
      ValueError: another parameter changes its shape.
    """
    shapes, resized = flat_shapes(variable_shapes(build_model(config))), []
    shapes |= {path: array for path, array in arrays.items() if open_clip.is_counter(path)}
    if removed := arrays.keys() - shapes.keys():
        raise ValueError(f"expected changes that keep the parameters, got a model without {min(removed)}")
    new = {}
    for path, array in arrays.items():
        if array.shape != shapes[path].shape:
            resized.append(path)
            array = resize_positions(path, array, original, shapes[path].shape)
        new[path] = array.astype(shapes[path].dtype, copy=False)
    return new, tuple(resized)


def default_config(source: Source, model: str | None) -> CLIPConfig | None:
    """Return the configuration that a user names for a source without one, else None.

    Raises:
      ValueError: the source has a configuration, or the model is unknown.
    """
    if model is None:
        return None
    if source.config is not None:
        raise ValueError(f"expected model=None for {source.name}, which has a configuration, got {model!r}")
    return model_config(model)


def read_config(source: Source, default: CLIPConfig | None = None) -> CLIPConfig:
    """Read the configuration of a source; `default` is for a source without one.

    Raises:
      ValueError: it has a field that is not supported, or there is none.
    """
    if source.config is None:
        if default is None:
            raise ValueError(
                f"expected {CONFIG_FILE} or {hugging_face.CONFIG_FILE} beside {source.name}, got none; name its model"
            )
        return default
    if source.format == "open_clip":
        return read_open_clip_config(source.config)
    return hugging_face.read_config(source.config, source.preprocessor, default)


def _common_dtype(tensors: Tensors) -> str:
    """Return the half-precision dtype of all floating parameters, else float32; running statistics have their own."""
    dtypes = {
        array.dtype.name
        for name, array in tensors.items()
        if array.ndim > 0 and jnp.issubdtype(array.dtype, jnp.floating) and "running_" not in name
    }
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {"bfloat16", "float16"} else "float32"
