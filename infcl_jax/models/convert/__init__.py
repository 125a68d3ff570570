"""Weights of OpenCLIP and Hugging Face models, both ways."""

from infcl_jax.models.convert.api import ExportFormat as ExportFormat
from infcl_jax.models.convert.api import convert as convert
from infcl_jax.models.convert.api import load_pretrained as load_pretrained
from infcl_jax.models.convert.api import resize_variables as resize_variables
from infcl_jax.models.convert.api import save_pretrained as save_pretrained
from infcl_jax.models.convert.sources import open_source as open_source
from infcl_jax.models.convert.stablehlo import export_stablehlo as export_stablehlo
from infcl_jax.models.registry import config_of as config_of
from infcl_jax.models.registry import inference_tower as inference_tower
