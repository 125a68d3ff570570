"""Weights of OpenCLIP and Hugging Face models, both ways."""

from infcl_jax.models.convert.api import (
    ExportFormat,
    convert,
    load_pretrained,
    resize_variables,
    save_pretrained,
)
from infcl_jax.models.convert.sources import open_source
from infcl_jax.models.convert.stablehlo import export_stablehlo
from infcl_jax.models.registry import config_of, inference_tower

__all__ = [
    "ExportFormat",
    "config_of",
    "convert",
    "export_stablehlo",
    "inference_tower",
    "load_pretrained",
    "open_source",
    "resize_variables",
    "save_pretrained",
]
