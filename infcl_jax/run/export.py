"""Weights of a run, written for other programs."""

from pathlib import Path
from typing import Any

from infcl_jax.inference.pretrained_tokenizer import copy_tokenizer
from infcl_jax.models import CLIPConfig, save_pretrained
from infcl_jax.run.base import make_run
from infcl_jax.run.model import saved_config
from infcl_jax.runtime.console import say

FOLDER = "exported"  # in the work directory
FORMATS = ("open_clip", "hf", "stablehlo")


def export(workdir: str | Path, output: str | Path, format: str | None = None, dim: int | None = None) -> str:
    """Write the latest checkpoint of a run for other programs.

    Examples:
      >>> checked = infcl_jax.export("runs/digits", "exported_digits")
      exported step 1 of runs/digits: ...

    Args:
      workdir: directory of the run.
      output: folder of the exported model, created if missing. A folder `tokenizer` is a copy of the run's. Each
        encoder of text retrieval has its tokenizer in its own folder.
      format: "open_clip", "hf" or "stablehlo"; None: "hf" for text retrieval, else "open_clip".
      dim: size of the features' prefix; None: the whole features.

    Returns:
      One line on the files, read and converted back, see `infcl_jax.models.save_pretrained`.

    Raises:
      FileNotFoundError: no run or no checkpoint in `workdir`.
      ValueError: the format has no such model, or `dim` is too large or the projections are not linear.
    """
    if format not in (None, *FORMATS):
        raise ValueError(f"expected format to be one of {FORMATS}, got {format!r}")
    return make_run(saved_config(workdir), origin=Path(workdir)).export(Path(output), format, dim)


def export_weights(workdir: Path, config: CLIPConfig, variables: Any) -> None:
    """Write the weights of a finished run to `workdir/exported`, or say why they cannot be written."""
    output = workdir / FOLDER
    try:
        save_pretrained(output, config, variables, compare_features=False)
        copy_tokenizer(workdir, output)
    except (OSError, ValueError) as error:
        say(f"warning: the weights were not exported: {error}")
    else:
        say(f"exported the weights to {output}")
