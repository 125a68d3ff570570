r"""Prepare a dataset on disk, unless it exists.

    python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=data

Built-in datasets: shapes/quickstart (35 MB, about 15 s on two cores), shapes/full (0.5 GB, minutes), digits (nothing to
prepare). Other names are looked up in the TFDS catalog. Some of its datasets need TensorFlow for preparation, none for
reading.
"""

import tensorflow_datasets as tfds
from absl import flags

from experiments import command_line
from infcl_jax.data import prepare

_DATASET = flags.DEFINE_string("dataset", "shapes/quickstart", "Dataset name, with its TFDS config if it has one.")
_DATA_DIR = flags.DEFINE_string("data_dir", "data", "Folder of the prepared datasets.")


def main() -> None:
    """Prepare the dataset that the flags name."""
    tfds.disable_progress_bar()
    print(prepare(_DATASET.value, _DATA_DIR.value))


if __name__ == "__main__":
    command_line.run(main)
