"""Write the features of the images or captions of a dataset to a file.

    python -m experiments.embed --model=runs/photos --source=photos --output=photos.safetensors

encodes the images of a folder, a table, tar files or any other dataset on all devices. The output has float32 features
with the index and the key of each record. `--captions` encodes all captions instead. The extension chooses the format,
.safetensors, .npy or .parquet. `infcl_jax.evaluation.read_features` reads each of them.

An interrupted command continues where it stopped. Its finished shards are in the folder .FILE.shards next to the
output. Bad records are left out and reported, up to `--max_bad_records`.
"""

import dataclasses

from absl import flags

from experiments import command_line
from infcl_jax.data import load_source
from infcl_jax.inference.feature_files import check_feature_file
from infcl_jax.run.build import start_processes
from infcl_jax.run.embed import embed
from infcl_jax.run.load import load_encoder
from infcl_jax.runtime.console import say

_MODEL, _SOURCE, _OUTPUT, _SPLIT, _DATA_DIR, _MAX_PIXELS = map(
    command_line.shared_flag, ("model", "source", "output", "split", "data_dir", "max_image_pixels")
)
_CAPTIONS = flags.DEFINE_bool("captions", False, "Encode the captions instead of the images.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Images or captions encoded at once, over all devices.")
_DTYPE = flags.DEFINE_string("dtype", None, "Dtype of activations, such as bfloat16. Default: that of the model.")
_DIM = flags.DEFINE_integer(
    "dim",
    None,
    "Size of the features' prefix to write, of a model trained with matryoshka. Default: all.",
    lower_bound=1,
    allow_override=True,
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Tokenizer, see docs/data.md. Default: that of the model.")
_WORKERS = flags.DEFINE_integer("num_workers", None, "Reading processes; 0: threads. Default: by the CPU cores.")
_MAX_BAD = flags.DEFINE_float(
    "max_bad_records", None, "Largest number of bad records, as config.max_bad_records.", lower_bound=0
)


def main() -> None:
    """Embed the dataset of the flags."""
    for flag in (_MODEL, _SOURCE, _OUTPUT):
        if not flag.value:
            raise ValueError("expected --model, --source and --output, got fewer; see --help")
    check_feature_file(_OUTPUT.value)
    start_processes()
    source = load_source(_SOURCE.value, _SPLIT.value, _DATA_DIR.value)
    encoder = load_encoder(_MODEL.value, tokenizer=_TOKENIZER.value, dtype=_DTYPE.value, batch_size=_BATCH_SIZE.value)
    if _DIM.value is not None:
        encoder = encoder.prefix(_DIM.value)
    if _MAX_PIXELS.value is not None:
        encoder = dataclasses.replace(encoder, max_image_pixels=_MAX_PIXELS.value)
    captions, workers = _CAPTIONS.value, _WORKERS.value
    say(embed(encoder, source, _OUTPUT.value, captions=captions, num_workers=workers, max_bad_records=_MAX_BAD.value))


if __name__ == "__main__":
    command_line.run(main)
