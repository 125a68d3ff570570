"""Writer of captioned images as a TFDS dataset in array_record format."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from infcl_jax.data.encode import encode_png
from infcl_jax.data.sources.base import Example

VERSION = "1.0.0"


class _Captioned(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Encoded images with their captions, in the given order."""

    VERSION = tfds.core.Version(VERSION)
    url_infos = None  # nothing is downloaded, so TFDS needs no checksums

    def __init__(self, name: str, split: str, examples: Iterable[tuple[int, Example]], **options: Any):
        self.name, self._split, self._examples = name, split, examples
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {"image": tfds.features.Image(), "captions": tfds.features.Sequence(tfds.features.Text())}
        )
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager  # nothing to download
        return {self._split: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, example in self._examples:
            image = example["image"]
            # TFDS copies the contents of a file, and needs TensorFlow to encode pixels.
            file = io.BytesIO(image if isinstance(image, bytes) else encode_png(image))
            yield index, {"image": file, "captions": list(example["captions"])}


def write_records(output: Path, split: str, examples: Iterable[tuple[int, Example]], shards: int) -> None:
    """Write one split as a TFDS dataset in array_record format.

    The dataset is `output.name` in the data directory `output.parent`. An interrupted call leaves no dataset that looks
    complete.

    Args:
      output: folder of the dataset.
      split: name of the split.
      examples: (key, example) pairs with ascending keys; pixels become PNG files.
      shards: number of files.

    Raises:
      ValueError: the name of the folder is no identifier, or the dataset exists.
    """
    if not output.name.isidentifier():
        raise ValueError(f"expected letters, digits and _ in the name of a TFDS dataset, got {output.name!r}")
    if (output / VERSION).exists():
        raise ValueError(f"expected a new dataset, got {output}, which exists; choose another --output")
    builder = _Captioned(output.name, split, examples, data_dir=str(output.parent), file_format="array_record")
    with contextlib.redirect_stdout(io.StringIO()):  # hides the progress of TFDS
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards))
