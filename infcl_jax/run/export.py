"""Weights of a finished run, written for other programs."""

from pathlib import Path
from typing import Any

from infcl_jax import run
from infcl_jax.data import load_tokenizer
from infcl_jax.inference.pretrained_tokenizer import save_tokenizer
from infcl_jax.models import save_pretrained
from infcl_jax.runtime.console import say

FOLDER = "exported"  # in the work directory


def export_weights(workdir: Path, variables: Any) -> None:
    """Write the weights of a finished run to `workdir/exported`, for OpenCLIP and `infcl_jax.load`.

    A model that OpenCLIP does not have ends in a warning, not in an error.

    Args:
      workdir: directory of the run, with its `config.json`.
      variables: Flax variables on the host.
    """
    config, output = run.read_model_config(run.saved_config(workdir)), workdir / FOLDER
    try:
        save_pretrained(output, config, variables, compare_features=False)
        copy_tokenizer(workdir, output)
    except (OSError, ValueError) as error:
        say(f"warning: the weights were not exported: {error}")
    else:
        say(f"exported the weights to {output}")


def copy_tokenizer(workdir: Path, output: Path) -> None:
    """Copy the tokenizer of a run, if it has one."""
    if (tokenizer := workdir / run.TOKENIZER_FOLDER).is_dir():
        save_tokenizer(output, load_tokenizer(tokenizer))
