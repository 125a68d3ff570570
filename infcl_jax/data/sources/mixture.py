"""Mixtures of sources, interleaved by weight."""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any
from urllib.parse import urlencode

import grain
import numpy as np

from infcl_jax.data.sources import files, paths
from infcl_jax.data.sources.base import (
    Classes,
    Source,
    check_index,
    classes,
    dropped_samples,
    image_numbers,
    is_captioned,
    locate,
    starts_of,
)
from infcl_jax.data.sources.sample_range import SampleRange, SourceView

_MAX_WILD = 4  # components with wildcards; links to their own folder match again in each
_KEYS = ("path", "weight", "max_samples", "split", "name")
_SEED_STEP = 0x9E3779B1  # 2**32 over the golden ratio; the seeds of the components differ


class MixtureSource(SourceView):
    """Several sources as one.

    A sample index is the index within its component plus the number of samples in the components before it. In
    training, the components are interleaved by weight in a fixed pattern. Each component has its own epochs: it repeats
    no sample before all of its samples were seen.

    Args:
      components: sources by their names for metrics, in the order of their sample indices.
      weights: relative rates of the components, positive.
    """

    def __init__(self, components: Mapping[str, Source], weights: Sequence[float], name: str, split: str):
        self.name, self.split, self.names = name, split, tuple(components)
        self._components, self._weights = tuple(components.values()), _integers(weights)
        self._starts = starts_of(map(len, self._components))
        self.captioned = all(map(is_captioned, self._components))

    @property
    def dropped(self) -> dict[str, int]:
        """Number of samples that the components leave out, by component and reason."""
        return {
            f"{reason} ({name})": count
            for name, source in zip(self.names, self._components, strict=True)
            for reason, count in dropped_samples(source).items()
        }

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _component(self, index: int) -> tuple[int, int]:
        check_index(index, len(self))
        return locate(self._starts, index)

    def locate(self, index: int) -> tuple[Source, int]:
        """Return the component of a sample and the index within it."""
        component, row = self._component(index)
        return self._components[component], row

    def image_numbers(self) -> np.ndarray:
        """Number the different images of each component."""
        numbers = [image_numbers(component) for component in self._components]
        starts = starts_of(int(images.max()) + 1 for images in numbers)
        return np.concatenate([images + start for images, start in zip(numbers, starts, strict=False)])

    def classes(self) -> Classes:
        """Return the classes of the components, which must be the same."""
        found = [classes(component) for component in self._components]
        if any(component.names != found[0].names for component in found):
            raise ValueError(f"expected components of {self.name} with the same classes; evaluate each of them alone")
        return found[0]

    def source_name(self, index: int) -> str:
        """Name the component of a record."""
        return self.names[self._component(index)[0]]

    def order(self, seed: int) -> grain.MapDataset:
        """Return the sample index of every global row, interleaved by weight."""
        orders = [
            grain.MapDataset.range(len(component)).seed((seed + number * _SEED_STEP) % 2**32).shuffle()
            for number, component in enumerate(self._components)
        ]
        return _Interleaved(orders, self._weights, self._starts[:-1].tolist())

    def fingerprint(self) -> int:
        """Return a number that changes with the components' sizes and weights."""
        return zlib.crc32(repr((self._weights, self._starts.tolist())).encode())


class _Interleaved(grain.MapDataset):
    """Rows of several datasets, interleaved by weight, each with an offset."""

    def __init__(self, parents: Sequence[grain.MapDataset], weights: Sequence[int], offsets: Sequence[int]):
        super().__init__(parents)
        self._weights, self._offsets = list(weights), list(offsets)
        self._length = sum(len(parent) for parent in parents)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        component, row = interleave(index, self._weights)
        return self.parents[component][row] + self._offsets[component]


def interleave(row: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return the component of a global row, and the row within that component.

    Of the first n rows, component i gets its share w_i / sum(w) to within the number of components. Weights are
    positive integers.
    """
    remaining = sum(weights)
    for component, weight in enumerate(weights):
        # Of the first n rows left by earlier components, component i takes ceil(n * w_i / (w_i + w_{i+1} + ...)).
        before, after = -(-row * weight // remaining), -(-(row + 1) * weight // remaining)
        if after > before:
            return component, before
        row -= before
        remaining -= weight
    raise AssertionError("unreachable: the last component takes every row")


def _integers(weights: Sequence[float]) -> list[int]:
    """Scale weights to integers, exactly where they are ratios of small integers."""
    shares = [Fraction(str(weight)).limit_denominator(10**6) for weight in weights]
    denominator = int(np.lcm.reduce([share.denominator for share in shares], dtype=object))
    return [max(1, int(share * denominator)) for share in shares]


def load_mixture(
    path: str, split: str, load: Callable[[str, str], Source], outside: bool | None = None
) -> MixtureSource:
    """Open the mixture of a JSON file.

    The file is a list of {"path": dataset, "weight": rate, "max_samples": count, "split": split, "name": name}.
    Relative paths start at the folder of the file. Without weights, the rates are the numbers of samples. `max_samples`
    takes the first samples. `split` is by default the mixture's, `name` is the path.

    `load(dataset, split)` opens a component. For `outside` see `paths.resolve`.
    """
    entries = _entries(path)
    components: dict[str, Source] = {}
    named: list[str] = []
    for number, entry in enumerate(entries):
        name = entry.get("name", entry["path"])
        if name in components:
            raise ValueError(f'{path}: expected different names, got {name!r} twice; give each component a "name"')
        try:
            dataset, names = _resolve(entry["path"], path.rpartition("/")[0], outside)
            source = load(dataset, entry.get("split", split))
        except (ValueError, FileNotFoundError) as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
            raise kind(f"{path}, component {number}: {error}") from error
        named += names
        limit = entry.get("max_samples")
        components[name] = source if limit is None else SampleRange(source, 0, min(limit, len(source)), source.split)
    weights = [
        entry.get("weight", len(component)) for entry, component in zip(entries, components.values(), strict=True)
    ]
    if named and outside is None:
        paths.report_outside(path, [paths.column(named)], path.rpartition("/")[0])
    return MixtureSource(components, weights, path, split)


def _entries(path: str) -> list[dict[str, Any]]:
    entries = files.read_json(path, object)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f'{path}: expected a list of {{"path": ..., "weight": ...}}, got {str(entries)[:40]}')
    for number, entry in enumerate(entries):
        _check_entry(f"{path}, component {number}", entry)
    if len({"weight" in entry for entry in entries}) > 1:
        raise ValueError(f"{path}: expected a weight for every component or for none")
    return entries


def _check_entry(entry_name: str, entry: Any) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise ValueError(f'{entry_name}: expected an object with a "path", got {str(entry)[:40]}')
    if set(entry) - set(_KEYS):
        unknown = ", ".join(sorted(set(entry) - set(_KEYS)))
        raise ValueError(f"{entry_name}: expected the keys {', '.join(_KEYS)}, got {unknown}")
    if paths.split_options(entry["path"])[0].rstrip("/").endswith(".json"):
        raise ValueError(
            f"{entry_name}: expected a dataset that is no mixture, got {entry['path']}; list its components here"
        )
    for key in ("split", "name"):
        if not isinstance(entry.get(key, ""), str):
            raise ValueError(f"{entry_name}: expected a text for {key!r}, got {entry[key]!r}")
    weight, limit = entry.get("weight", 1), entry.get("max_samples", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-6 <= weight < float("inf"):
        raise ValueError(f"{entry_name}: expected a weight of at least 1e-6, got {weight!r}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"{entry_name}: expected max_samples >= 1, got {limit!r}")


def _resolve(dataset: str, folder: str, outside: bool | None) -> tuple[str, list[str]]:
    """Resolve the paths of a component against the mixture's folder."""
    path, options = paths.split_options(dataset)
    patterns = list(map(os.path.expanduser, path.split("::")))
    if len(patterns) == 1 and not _is_path(folder, path):
        return dataset, []
    if paths.outside_option(options) and not outside:
        raise ValueError(f"expected {paths.OUTSIDE}=true at the mixture, got it in {dataset}")
    named = []
    for pattern in patterns:
        named += [pattern] if os.path.exists(_join(folder, pattern)) else files.expand_braces(pattern)
    for name in named:
        _check_wildcards(name)
        paths.resolve(name, folder, outside)
    joined = "::".join(_join(folder, pattern) for pattern in patterns)
    if outside is False:
        for file in files.expand(joined) if files.has_pattern(joined) else ():
            paths.check_inside(file, folder)
    if "folder" in options:
        named.append(options["folder"] + "/")
        options["folder"] = paths.resolve(options["folder"], folder, outside)
    if outside is not None:
        options.setdefault(paths.OUTSIDE, str(outside).lower())
    return joined + (f"?{urlencode(options, safe='/,:')}" if options else ""), named


def _check_wildcards(pattern: str) -> None:
    """Refuse wildcards whose search may take exponential time."""
    components = pattern.split("/")
    wild = [number for number, text in enumerate(components) if any(character in text for character in "*?[")]
    if wild and ("**" in pattern or len(wild) > _MAX_WILD or ".." in components[wild[0] :]):
        raise ValueError(
            f"expected wildcards in at most {_MAX_WILD} components of a path, without ** and .., got {pattern[:100]}"
        )


def _join(folder: str, path: str) -> str:
    return path if not folder or files.is_remote(path) or os.path.isabs(path) else f"{folder}/{path}"


def _is_path(folder: str, dataset: str) -> bool:
    """Tell a path from the name of a dataset."""
    if files.is_remote(dataset) or dataset.startswith(("/", ".", "~")) or ".." in dataset.split("/"):
        return True
    if files.has_pattern(dataset) or os.path.splitext(dataset)[1] != "":
        return True
    return not files.is_remote(folder) and os.path.exists(os.path.join(folder, dataset))
