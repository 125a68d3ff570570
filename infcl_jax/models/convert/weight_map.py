"""Mapping between parameters of this library and tensors of PyTorch models, both ways."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from infcl_jax.models.convert.tensor_files import Tensors

Layout = Literal["same", "linear", "conv", "unit_axis", "unit_axes", "scalar"]
_SHOWN = 4  # names listed in an error


class Rule(NamedTuple):
    """Rule that names the tensors of a parameter.

    Attributes:
      pattern: regular expression that matches the whole path of the parameter, such as "params/visual/conv1/kernel".
      names: names of its tensors, with groups of the pattern as `{0}`, `{1}`. The parameter is their concatenation
        over the last axis, after the change of layout.
      layout: change of layout from PyTorch. "linear": [out, in] to [in, out]. "conv": [out, in, h, w] to
        [h, w, in, out]. "unit_axis", "unit_axes": remove one or two leading axes of size 1. "scalar": one element to
        shape (). "same": none. None: "linear" or "conv" for kernels, by their dimensions, else "same".
      share: (index, count) for a parameter that is one of `count` equal shares of the tensor's first axis, as of fused
        projections; None for the whole tensor.
    """

    pattern: str
    names: tuple[str, ...]
    layout: Layout | None = None
    share: tuple[int, int] | None = None


class Entry(NamedTuple):
    """A parameter and its tensors, see `Rule`."""

    path: str
    names: tuple[str, ...]
    layout: Layout
    share: tuple[int, int] | None


class WeightMap(NamedTuple):
    """Mapping of all parameters of a model.

    Attributes:
      entries: one entry for each parameter and running statistic.
      unused: regular expression of tensors without a parameter: buffers, and heads of other tasks.
      buffers: constant tensors of an export that the other library expects, by name.
    """

    entries: tuple[Entry, ...]
    unused: str
    buffers: Mapping[str, np.ndarray]

    def names(self) -> set[str]:
        """Return the names of the tensors with a parameter."""
        return {name for entry in self.entries for name in entry.names}


def flat_shapes(variables: Any) -> dict[str, Any]:
    """Map the paths of variables, such as "params/visual/proj/kernel", to their leaves."""
    return flatten_dict(variables, sep="/")


def match_rules(rules: Sequence[Rule], shapes: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Apply the first matching rule to each path.

    Args:
      rules: ordered rules.
      shapes: arrays or shapes by path, see `flat_shapes`.

    Raises:
      ValueError: a path matches no rule; the format has no such parameter.
    """
    entries, unmatched = [], []
    for path, array in shapes.items():
        for rule in rules:
            if match := re.fullmatch(rule.pattern, path):
                names = tuple(name.format(*match.groups()) for name in rule.names)
                entries.append(Entry(path, names, rule.layout or _default_layout(path, array), rule.share))
                break
        else:
            unmatched.append(path)
    if unmatched:
        raise ValueError(f"expected parameters that the format has, got {_listed(unmatched)}; choose another format")
    return tuple(entries)


def to_variables(weights: WeightMap, tensors: Tensors, shapes: Mapping[str, Any], source: Any) -> dict[str, Any]:
    """Convert tensors to variables.

    Args:
      weights: mapping of the model.
      tensors: tensors by name.
      shapes: shape of each variable by path.
      source: file or folder, for error messages.

    Returns:
      Variables of the model as NumPy arrays, in the tensors' dtypes.

    Raises:
      ValueError: a tensor is missing, has no parameter or another shape; the message lists the first few.
    """
    known = weights.names()
    missing = sorted(known - tensors.keys())
    unknown = sorted(name for name in tensors.keys() - known if not re.fullmatch(weights.unused, name))
    problems = [f"{kind} {_listed(names)}" for kind, names in (("without", missing), ("with", unknown)) if names]
    if problems:
        raise ValueError(f"expected the tensors of the model in {source}, got one {' and '.join(problems)}")
    variables, wrong = {}, []
    for entry in weights.entries:
        array = _to_parameter(entry, [tensors[name] for name in entry.names])
        if array is None or array.shape != shapes[entry.path].shape:
            found = [list(tensors[name].shape) for name in entry.names]
            wrong.append(f"{', '.join(entry.names)} {found} for {entry.path} {list(shapes[entry.path].shape)}")
        variables[entry.path] = array
    if wrong:
        raise ValueError(f"expected the shapes of the model in {source}, got {_listed(wrong)}; check its configuration")
    return unflatten_dict(variables, sep="/")


def to_tensors(weights: WeightMap, arrays: Mapping[str, np.ndarray]) -> Tensors:
    """Convert variables to tensors, the inverse of `to_variables`.

    Args:
      weights: mapping of the model.
      arrays: variables of the model by path.

    Returns:
      NumPy arrays by name, with the buffers of the format.
    """
    tensors: Tensors = dict(weights.buffers)
    shares: dict[str, dict[int, np.ndarray]] = {}
    for entry in weights.entries:
        array, (_, to_torch) = arrays[entry.path], _LAYOUTS[entry.layout]
        parts = [array] if len(entry.names) == 1 else np.split(array, len(entry.names), axis=-1)
        for name, part in zip(entry.names, parts, strict=True):
            tensors[name] = to_torch(part)
            if entry.share is not None:
                shares.setdefault(name, {})[entry.share[0]] = tensors[name]
    for name, by_index in shares.items():
        tensors[name] = np.concatenate([by_index[index] for index in sorted(by_index)])
    return tensors


_LAYOUTS: dict[Layout, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "same": (lambda a: a, lambda a: a),
    "linear": (lambda a: a.transpose(1, 0), lambda a: a.transpose(1, 0)),
    "conv": (lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1)),
    "unit_axis": (lambda a: a.squeeze(0), lambda a: a[None]),
    "unit_axes": (lambda a: a.squeeze((0, 1)), lambda a: a[None, None]),
    "scalar": (lambda a: a.reshape(()), lambda a: a),
}


def _to_parameter(entry: Entry, tensors: Sequence[np.ndarray]) -> np.ndarray | None:
    """Convert the tensors of one parameter; None if their dimensions do not fit the layout."""
    to_jax, _ = _LAYOUTS[entry.layout]
    if entry.share is not None:
        index, count = entry.share
        tensors = [np.split(tensor, count)[index] for tensor in tensors if len(tensor) % count == 0]
    try:
        arrays = [to_jax(tensor) for tensor in tensors]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
    except ValueError:
        return None


def _default_layout(path: str, array: Any) -> Layout:
    if not path.endswith("/kernel"):
        return "same"
    return "conv" if len(array.shape) == 4 else "linear"


def _listed(names: Collection[str]) -> str:
    """Format the first few names and the count."""
    shown = ", ".join(list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, ... ({len(names)} in all)"
