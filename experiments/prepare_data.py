r"""Prepare a dataset on disk, unless it exists.

    python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=data

Built-in datasets: shapes/quickstart (35 MB, about 15 s on two cores), shapes/full (0.5 GB, minutes), digits (nothing to
prepare). Other names are looked up in the TFDS catalog. Some of its datasets need TensorFlow for preparation, none for
reading.

    python -m experiments.prepare_data --source=data/train.parquet --output=data/tars

writes any dataset as tar files with an index, which training reads at random fastest: tables with images, many small
files, or TFDS datasets. An interrupted conversion continues. `--max_side=512` reduces larger images, which then decode
faster. With `--file_format=array_record`, `--output=data/photos` is the TFDS dataset photos in the folder data.

    python -m experiments.prepare_data --source=data/captions.csv --train_tokenizer=data/tokenizer --vocab_size=16384

trains a byte-pair tokenizer on the captions of a dataset, the value of `--config.tokenizer` in training.
"""

import tensorflow_datasets as tfds
from absl import flags

from experiments import command_line
from infcl_jax.data import convert, prepare, prepare_tokenizer
from infcl_jax.data.convert import FILE_FORMATS
from infcl_jax.data.decode.pillow import MAX_PIXELS
from infcl_jax.data.tokenizers.clip import CLIP_VOCAB_SIZE
from infcl_jax.runtime.outputs import print_line

_DATASET = flags.DEFINE_string("dataset", "shapes/quickstart", "Dataset name, with its TFDS config if it has one.")
_DATA_DIR, _SOURCE, _OUTPUT, _SPLIT, _MAX_PIXELS = map(
    command_line.shared_flag, ("data_dir", "source", "output", "split", "max_image_pixels")
)
_FORMAT = flags.DEFINE_enum("file_format", FILE_FORMATS[0], FILE_FORMATS, "Format of --output.")
_MAX_SIDE = flags.DEFINE_integer(
    "max_side", None, "Longest side of the images, in pixels; larger images of --source are resized.", lower_bound=1
)
_TOKENIZER = flags.DEFINE_string("train_tokenizer", None, "Folder of a tokenizer to train on --source.")
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", CLIP_VOCAB_SIZE, "Token ids of --train_tokenizer.")


def main() -> None:
    """Prepare or convert a dataset, or train a tokenizer on it."""
    tfds.disable_progress_bar()
    outputs = [value for value in (_OUTPUT.value, _TOKENIZER.value) if value is not None]
    if len(outputs) != (_SOURCE.value is not None):
        raise ValueError(
            "expected --source with either --output or --train_tokenizer, got"
            f" --source={_SOURCE.value}, --output={_OUTPUT.value}, --train_tokenizer={_TOKENIZER.value}"
        )
    split, data_dir = _SPLIT.value, _DATA_DIR.value
    if _SOURCE.value is None:
        print_line(prepare(_DATASET.value, data_dir))
    elif _OUTPUT.value is not None:
        summary = convert(
            _SOURCE.value,
            _OUTPUT.value,
            split=split,
            data_dir=data_dir,
            max_side=_MAX_SIDE.value,
            file_format=_FORMAT.value,
            max_image_pixels=_MAX_PIXELS.value or MAX_PIXELS,
        )
        print_line(summary)
    else:
        size = _VOCAB_SIZE.value
        print_line(prepare_tokenizer(_SOURCE.value, _TOKENIZER.value, vocab_size=size, split=split, data_dir=data_dir))


if __name__ == "__main__":
    command_line.run(main)
