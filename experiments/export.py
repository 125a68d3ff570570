"""Export the latest checkpoint of a run for other programs.

    python -m experiments.export --workdir=runs/quickstart --output=exported --format=open_clip

The formats are those of `infcl_jax.models.save_pretrained` ("open_clip", "hf"), and "stablehlo": both encoders as
portable programs, with a README that says how to call them. `certificate.json` is the evidence that nothing was lost.
A run of text retrieval has the format "hf": a BERT for `transformers` in each of `query_encoder`, `passage_encoder`.
"""

from pathlib import Path

import jax
from absl import flags

from experiments import command
from infcl_jax import run
from infcl_jax.inference.text_encoder import load_text_encoder
from infcl_jax.models import Certificate, build_model, save_pretrained, text_pair_config, variable_shapes
from infcl_jax.models.convert import export_stablehlo
from infcl_jax.models.prefix import prefix_model
from infcl_jax.run.export import copy_tokenizer
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.training import restore_variables

FORMATS = ("open_clip", "hf", "stablehlo")

# Other commands have flags of the same names; all are imported in one process by tests.
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the exported model.", allow_override=True)
_FORMAT = flags.DEFINE_enum(
    "format", None, FORMATS, "Format of the exported model. Default: the first that has it.", allow_override=True
)
_DIM = flags.DEFINE_integer(
    "dim",
    None,
    "Size of the features' prefix to export, of a model trained with matryoshka. Default: all.",
    lower_bound=1,
    allow_override=True,
)


def export(workdir: str | Path, output: str | Path, format: str | None = None, dim: int | None = None) -> Certificate:
    """Export the latest checkpoint of a run.

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
    copy_tokenizer(workdir, output)
    say(f"exported step {step} of {workdir}: {certificate.summary()}")
    return certificate


def export_from_flags(workdir: str) -> None:
    """Export the run in `workdir` as the flags say.

    Raises:
      ValueError: `--output` is missing, or see `export`.
    """
    if not _OUTPUT.value:
        raise ValueError("expected --output, the folder of the exported model, got none")
    export(workdir, _OUTPUT.value, _FORMAT.value, _DIM.value)


if __name__ == "__main__":
    command.run(export_from_flags, saved_config=True)
