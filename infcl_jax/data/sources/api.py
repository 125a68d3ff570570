"""Sources by dataset name or path."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

from infcl_jax.data.sources import files, paths, splits, table
from infcl_jax.data.sources.base import Source
from infcl_jax.data.sources.builtin import DIGITS, DigitsSource
from infcl_jax.data.sources.captions import check_no_annotations
from infcl_jax.data.sources.folder import folder_source
from infcl_jax.data.sources.mixture import load_mixture
from infcl_jax.data.sources.sample_range import SampleRange
from infcl_jax.data.sources.tar import TarSource
from infcl_jax.data.sources.tfds import BUILT_IN, RecordSource, dataset_dir

# Function from a split to its source by dataset name. Names that are added here are datasets of `load_source`.
SOURCES: dict[str, Callable[[str], Source]] = {DIGITS: DigitsSource}

_TAR, _MIXTURE = ".tar", ".json"
_FILES = (_TAR, _MIXTURE, *table.EXTENSIONS)


def load_source(dataset: str, split: str, data_dir: str | Path = "data") -> Source:
    """Open one split of a dataset.

    A dataset is a name or a path:

    - "digits", or another name in `SOURCES`;
    - "shapes/quickstart", "coco_captions/2014": prepared TFDS dataset, `RecordSource`;
    - "shards-{00000..00041}.tar", "gs://bucket/*.tar", "a.tar::b.tar": tar files, `TarSource`;
    - "captions.csv", "captions.tsv", "captions.jsonl", "train-*.parquet": tables, `TableSource`;
    - a folder: the first of these that it has, `folder_source` for all but the first two:

      1. tar files, also with the parquet files of img2dataset next to them;
      2. tables, unless they are the records of img2dataset next to folders of images;
      3. a `metadata.csv`, `metadata.jsonl` or `metadata.parquet` of images;
      4. images with captions in `.txt` files, such as the layout "files" of img2dataset;
      5. images in a subfolder per class;

    - "mixture.json": several datasets with weights, `load_mixture`.

    Tar files and tables together are an error. Hidden files and folders are left out, as are files of operating
    systems, such as "@eaDir". Folders behind links are read.

    A path takes options at its end: "captions.csv?image=file&caption=title,alt&folder=/images",
    "*.tar?caption=alt&image=input.jpg" or "labels.csv?label=kind". With "?caption=none", the images of a path need no
    captions or labels, for features alone.

    A path in a table or mixture stays on the file system of its folder, unless the option is "?outside=true". With
    "?outside=false", it stays in the folder.

    Examples:
      >>> source = load_source("photos", "train")
      >>> len(source), source[0]["caption"]
      (8, 'caption 0')

    Args:
      dataset: name or path of the dataset.
      split: name of the split, "train" for a path without splits. The split of a folder is its subfolder or its files
        of that name. Paths also take bounds: "train[:90%]", "train[100:200]".
      data_dir: directory of the prepared datasets.

    Returns:
      A `Source`.

    Raises:
      FileNotFoundError: the dataset is not prepared, or a path does not exist.
      ValueError: the name, split or an option is unknown, the split is empty, there are no images or captions, or tar
        files are compressed.
      ImportError: the dataset needs a package that is not installed.
    """
    if dataset in SOURCES:
        return SOURCES[dataset](split)
    if not _is_path(dataset, data_dir):
        return RecordSource(dataset, split, data_dir)
    parsed = splits.parse_split(split)
    source = _load_path(dataset, parsed, data_dir)
    start, stop = parsed.bounds(len(source))
    if start >= stop:
        raise ValueError(f"expected a split of {dataset} with samples, got {split!r} of {len(source)} samples")
    return source if (start, stop) == (0, len(source)) else SampleRange(source, start, stop, split)


def _is_path(dataset: str, data_dir: str | Path) -> bool:
    path, _ = paths.split_options(dataset)
    if dataset in BUILT_IN:
        return False
    if path.endswith(_FILES) or files.is_remote(path) or files.has_pattern(path):
        return True
    if path.startswith(("/", "./", "../", "~")):
        return True
    return dataset_dir(dataset, data_dir) is None and os.path.exists(path)


def _load_path(dataset: str, split: splits.Split, data_dir: str | Path) -> Source:
    path, options = paths.split_options(dataset)
    path, outside = os.path.expanduser(path).rstrip("/"), paths.outside_option(options)
    if path.endswith(_MIXTURE):
        _check_exists(path)
        check_no_annotations(files.read_json(path, object), path)
        if split.start is not None or split.stop is not None:
            raise ValueError(
                f'expected a split without bounds for {path}; give its components bounds, as their "split"'
            )
        if set(options) - {paths.OUTSIDE}:
            raise ValueError(f"expected no options for the mixture {path}, got {', '.join(options)}")
        return load_mixture(path, split.name, functools.partial(load_source, data_dir=data_dir), outside)
    if files.has_pattern(path) or path.endswith(_FILES):
        splits.check_only_split(path, split.name)
        return _load_files(files.expand(path), dataset, split.name, options)
    _check_exists(path)
    if not os.path.isdir(path):
        files.check_uncompressed([path])
        raise ValueError(f"expected a folder or a file with one of the extensions {', '.join(_FILES)}, got {path}")
    names = splits.split_folder(path, split.name, (_TAR, *table.EXTENSIONS))
    if names[0] != path and os.path.isdir(names[0]):  # a split's subfolder, of tar files, tables or images
        names = splits.split_folder(names[0], splits.WHOLE, (_TAR, *table.EXTENSIONS))
    if os.path.isdir(names[0]):
        return folder_source(names[0], dataset, split.name, options)
    try:
        return _load_files(names, dataset, split.name, options)
    except ValueError as error:
        if hint := splits.images_hint(os.path.dirname(names[0])):
            raise ValueError(f"{error}{hint}") from error
        raise


def _load_files(names: list[str], dataset: str, split: str, options: dict[str, str]) -> Source:
    files.check_uncompressed(names)
    if all(name.endswith(_TAR) for name in names):
        if set(options) - {"caption", "image", paths.OUTSIDE}:
            raise ValueError(f"expected the options image, caption of tar files, got {', '.join(options)} in {dataset}")
        return TarSource(names, dataset, split, options.get("caption"), options.get("image"))
    if all(name.endswith(table.EXTENSIONS) for name in names):
        for name in names:
            _check_exists(name)
        return table.TableSource(names, dataset, split, options)
    raise ValueError(
        f"expected {dataset} to be tar files, or tables ({', '.join(table.EXTENSIONS)}), got {files.name_of(names[0])}"
        + (f" to {files.name_of(names[-1])}" if len(names) > 1 else "")
    )


def _check_exists(path: str) -> None:
    if not (files.is_file(path) if files.is_remote(path) else os.path.exists(path)):
        raise FileNotFoundError(f"{path} does not exist; check the path, relative to {os.getcwd()}")
