r"""Prepare a dataset on disk, unless it exists.

    python -m experiments.prepare_data --dataset=shapes/quickstart --data_dir=data

Built-in datasets: shapes/quickstart (35 MB, about 15 s on two cores), shapes/full (0.5 GB, minutes), digits (nothing to
prepare). Other names are looked up in the TFDS catalog. Some of its datasets need TensorFlow for preparation, none for
reading.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tensorflow_datasets as tfds
from absl import app, flags, logging

from infcl_jax.data import prepare

_DATASET = flags.DEFINE_string("dataset", "shapes/quickstart", "Dataset name, with its TFDS config if it has one.")
_DATA_DIR = flags.DEFINE_string("data_dir", "data", "Folder of the prepared datasets.")


def main(argv: Sequence[str]) -> None:
    """Prepare the dataset that the flags name.

    User errors exit with status 1 and one line on stderr.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    tfds.disable_progress_bar()
    try:
        print(prepare(_DATASET.value, _DATA_DIR.value))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
