"""Weights of a run, written for other programs."""

from pathlib import Path
from typing import Any

import jax

from infcl_jax import run
from infcl_jax.data import load_tokenizer
from infcl_jax.inference.pretrained_tokenizer import save_tokenizer
from infcl_jax.inference.text_encoder import load_text_encoder
from infcl_jax.models import Certificate, build_model, save_pretrained, text_pair_config, variable_shapes
from infcl_jax.models.convert import export_stablehlo
from infcl_jax.models.prefix import prefix_model
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.training import restore_variables

FOLDER = "exported"  # in the work directory
FORMATS = ("open_clip", "hf", "stablehlo")


def export(workdir: str | Path, output: str | Path, format: str | None = None, dim: int | None = None) -> Certificate:
    """Write the latest checkpoint of a run for other programs.

    Examples:
      >>> certificate = infcl_jax.export("runs/digits", "exported_digits")
      exported step 1 of runs/digits: ...
      >>> certificate.format
      'open_clip'

    Args:
      workdir: directory of the run.
      output: folder of the exported model, created if missing. A folder `tokenizer` is a copy of the run's. Each
        encoder of text retrieval has its tokenizer in its own folder.
      format: "open_clip", "hf" or "stablehlo"; None: "hf" for text retrieval, else "open_clip".
      dim: size of the features' prefix; None: the whole features.

    Returns:
      The certificate, also written as `certificate.json`.

    Raises:
      FileNotFoundError: no run or no checkpoint in `workdir`.
      ValueError: the format has no such model, or `dim` is too large or the projections are not linear.
    """
    if format not in (None, *FORMATS):
        raise ValueError(f"expected format to be one of {FORMATS}, got {format!r}")
    workdir, output, cpu = Path(workdir), Path(output), jax.local_devices(backend="cpu")[0]
    saved = run.saved_config(workdir)
    if text_pair_config(saved.model) is not None:
        if format not in (None, "hf") or dim is not None:
            raise ValueError(f"expected format 'hf' and no dim for a run of text retrieval, got {format!r} and {dim}")
        certificate = load_text_encoder(workdir, mesh=data_mesh([cpu])).save(output)
        say(f"exported {workdir}: {certificate.summary()}")
        return certificate
    config, format = run.read_model_config(saved), format or FORMATS[0]
    device = jax.sharding.SingleDeviceSharding(cpu)
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), variable_shapes(build_model(config))
    )
    step, variables = restore_variables(workdir, template)
    if dim is not None:
        config, variables = prefix_model(config, variables, dim)
    if format == "stablehlo":
        certificate = export_stablehlo(output, config, variables)
    else:
        certificate = save_pretrained(output, config, variables, format)  # type: ignore[arg-type]
    _copy_tokenizer(workdir, output)
    say(f"exported step {step} of {workdir}: {certificate.summary()}")
    return certificate


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
        _copy_tokenizer(workdir, output)
    except (OSError, ValueError) as error:
        say(f"warning: the weights were not exported: {error}")
    else:
        say(f"exported the weights to {output}")


def _copy_tokenizer(workdir: Path, output: Path) -> None:
    """Copy the tokenizer of a run, if it has one."""
    if (tokenizer := workdir / run.TOKENIZER_FOLDER).is_dir():
        save_tokenizer(output, load_tokenizer(tokenizer))
