"""Weights of OpenCLIP and Hugging Face models, both ways."""

from infcl_jax.models.convert.api import ExportFormat, convert, load_pretrained, save_pretrained
from infcl_jax.models.convert.certificate import Certificate
from infcl_jax.models.convert.configs import config_of

__all__ = ["Certificate", "ExportFormat", "config_of", "convert", "load_pretrained", "save_pretrained"]
