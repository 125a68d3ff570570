r"""Prepare a dataset on disk, unless it exists.

    python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=data

Built-in datasets: shapes/quickstart (35 MB, about 15 s on two cores), shapes/full (0.5 GB, minutes), digits (nothing to
prepare). Other names are looked up in the TFDS catalog. Some of its datasets need TensorFlow for preparation, none for
reading.

    python -m experiments.prepare_data --source=data/train.parquet --output=data/tars

writes any dataset as tar files with an index, which training reads at random fastest: tables with images, many small
files, or TFDS datasets. An interrupted conversion continues. `--max_side=512` reduces larger images, which then decode
faster.
"""

import tensorflow_datasets as tfds
from absl import flags

from experiments import command_line
from infcl_jax.data import convert, prepare

_DATASET = flags.DEFINE_string("dataset", "shapes/quickstart", "Dataset name, with its TFDS config if it has one.")
_DATA_DIR = flags.DEFINE_string("data_dir", "data", "Folder of the prepared datasets.")

_SOURCE = flags.DEFINE_string("source", None, "Dataset to write as tar files, see `infcl_jax.data.load_source`.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the tar files of --source.")
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
        source, output, data_dir = _SOURCE.value, _OUTPUT.value, _DATA_DIR.value
        print(convert(source, output, split=_SPLIT.value, data_dir=data_dir, max_side=_MAX_SIDE.value))


if __name__ == "__main__":
    command_line.run(main)
