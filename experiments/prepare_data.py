r"""Prepare a dataset on disk, unless it exists.

    python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=data

Built-in datasets: shapes/quickstart (35 MB, about 15 s on two cores), shapes/full (0.5 GB, minutes), digits (nothing to
prepare). Other names are looked up in the TFDS catalog. Some of its datasets need TensorFlow for preparation, none for
reading.

    python -m experiments.prepare_data --source=data/train.parquet --output=data/tars

writes any dataset as tar files with an index, which training reads at random fastest: tables with images, many small
files, or TFDS datasets. An interrupted conversion continues. `--max_side=512` reduces larger images, which then decode
faster. With `--file_format=array_record`, `--output=data/photos` is the TFDS dataset photos in the folder data.
"""

import tensorflow_datasets as tfds
from absl import flags

from experiments import command_line
from infcl_jax.data import convert, prepare
from infcl_jax.data.convert import FILE_FORMATS

_DATASET = flags.DEFINE_string("dataset", "shapes/quickstart", "Dataset name, with its TFDS config if it has one.")
_DATA_DIR = flags.DEFINE_string("data_dir", "data", "Folder of the prepared datasets.")

_SOURCE = flags.DEFINE_string("source", None, "Dataset to convert, see `infcl_jax.data.load_source`.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the converted dataset.")
_FORMAT = flags.DEFINE_enum("file_format", FILE_FORMATS[0], FILE_FORMATS, "Format of --output.")
_MAX_SIDE = flags.DEFINE_integer(
    "max_side", None, "Longest side of the images, in pixels; larger images of --source are resized.", lower_bound=1
)
_SPLIT = flags.DEFINE_string("split", "train", "Split of --source.")


def main() -> None:
    """Prepare or convert the dataset that the flags name.

    Raises:
      ValueError: only one of `--source` and `--output` is given, or the dataset is unknown.
    """
    tfds.disable_progress_bar()
    if (_SOURCE.value is None) != (_OUTPUT.value is None):
        raise ValueError("expected --source and --output together, got one of them")
    if _SOURCE.value is None:
        print(prepare(_DATASET.value, _DATA_DIR.value))
    else:
        line = convert(
            _SOURCE.value,
            _OUTPUT.value,
            split=_SPLIT.value,
            data_dir=_DATA_DIR.value,
            max_side=_MAX_SIDE.value,
            file_format=_FORMAT.value,
        )
        print(line)


if __name__ == "__main__":
    command_line.run(main)
