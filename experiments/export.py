"""Export the latest checkpoint of a run for other programs.

    python -m experiments.export --workdir=runs/quickstart --output=exported --format=open_clip

The formats are those of `infcl_jax.models.save_pretrained` ("open_clip", "hf"), and "stablehlo": both encoders as
portable programs, with a README that says how to call them. Files are read back, and one line says what was checked.
A run of text retrieval has the format "hf": a BERT for `transformers` in each of `query_encoder`, `passage_encoder`.
"""

from absl import flags

from experiments import command
from infcl_jax.run.export import FORMATS, export

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


def main() -> None:
    """Export the run in `--workdir` as the flags say."""
    workdir = command.given_workdir()
    if not _OUTPUT.value:
        raise ValueError("expected --output, the folder of the exported model, got none")
    export(workdir, _OUTPUT.value, _FORMAT.value, _DIM.value)


if __name__ == "__main__":
    command.run(main, saved_config=True)
