"""Mapping between parameters of this library and tensors of PyTorch models, both ways."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from infcl_jax.models.convert.tensor_files import Tensors
from infcl_jax.runtime.printable import printable

Layout = Literal["same", "linear", "conv", "unit_axis", "unit_axes", "scalar"]
_SHOWN, _LENGTH = 4, 400  # names listed in an error, and characters of each


class Rule(NamedTuple):
    """Rule that names the tensors of a parameter.

    Attributes:
      pattern: regular expression that matches the whole path of the parameter, such as "params/visual/conv1/kernel".
      names: names of its tensors, with groups of the pattern as `{0}`, `{1}`. The parameter is their concatenation over
        the last axis, after the change of layout.
      layout: change of layout from PyTorch, see `_LAYOUTS`. None: "linear" or "conv" for kernels, else "same".
      shares: relative sizes of the tensors on the concatenated axis; None for equal ones.
    """

    pattern: str
    names: tuple[str, ...]
    layout: Layout | None = None
    shares: tuple[int, ...] | None = None


def module_rules(path: str, *names: str, shares: tuple[int, ...] | None = None) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a convolution, dense layer or LayerNorm below "params"."""
    weights, biases = (tuple(f"{name}.{leaf}" for name in names) for leaf in ("weight", "bias"))
    return (
        Rule(rf"params/{path}/(?:kernel|scale)", weights, shares=shares),
        Rule(rf"params/{path}/bias", biases, shares=shares),
    )


class Entry(NamedTuple):
    """A parameter and its tensors, see `Rule`."""

    path: str
    names: tuple[str, ...]
    layout: Layout
    shares: tuple[int, ...]


class WeightMap(NamedTuple):
    """Mapping of all parameters of a model.

    Attributes:
      entries: one entry for each parameter and running statistic.
      unused: regular expression of tensors without a parameter, such as counters and heads of other tasks.
      buffers: constant tensors that the other library stores, by name; floating ones must be equal in a source.
    """

    entries: tuple[Entry, ...]
    unused: str
    buffers: Mapping[str, np.ndarray]

    def names(self) -> set[str]:
        """Return the names of the tensors with a parameter."""
        return {name for entry in self.entries for name in entry.names}

    def without(self, paths: Collection[str]) -> "WeightMap":
        """Return the mapping of the parameters alone that are not in `paths`."""
        return WeightMap(tuple(entry for entry in self.entries if entry.path not in paths), self.unused, {})


def flat_shapes(variables: Any) -> dict[str, Any]:
    """Map the paths of variables, such as "params/visual/proj/kernel", to their leaves."""
    return flatten_dict(variables, sep="/")


def match_rules(rules: Sequence[Rule], shapes: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Apply the first matching rule to each path of `shapes`.

    Raises:
      ValueError: a path matches no rule; the format has no such parameter.
    """
    entries, unmatched = [], []
    for path, array in shapes.items():
        for rule in rules:
            if match := re.fullmatch(rule.pattern, path):
                names = tuple(name.format(*match.groups()) for name in rule.names)
                layout = rule.layout or _default_layout(path, array)
                entries.append(Entry(path, names, layout, rule.shares or (1,) * len(names)))
                break
        else:
            unmatched.append(path)
    if unmatched:
        raise ValueError(f"expected parameters that the format has, got {_listed(unmatched)}; choose another format")
    return tuple(entries)


def to_variables(weights: WeightMap, tensors: Tensors, shapes: Mapping[str, Any], source: Any) -> dict[str, Any]:
    """Convert tensors to variables, NumPy arrays in the tensors' dtypes.

    Raises:
      ValueError: a tensor is missing, has no parameter or another shape; the message has `source` and the first few.
    """
    known = weights.names()
    missing = sorted(known - tensors.keys())
    unused = [name for name in sorted(tensors.keys() - known) if not re.fullmatch(weights.unused, name)]
    unknown = [name for name in unused if not _is_buffer(tensors[name], weights.buffers.get(name))]
    problems = [f"{kind} {_listed(names)}" for kind, names in (("without", missing), ("with", unknown)) if names]
    if problems:
        raise ValueError(f"expected the tensors of the model in {source}, got one {' and '.join(problems)}")
    variables, wrong = {}, []
    for entry in weights.entries:
        array = _to_parameter(entry, [tensors[name] for name in entry.names])
        if array is None or array.shape != shapes[entry.path].shape:
            shape = [list(tensors[name].shape) for name in entry.names]
            wrong.append(f"{', '.join(entry.names)} {shape} for {entry.path} {list(shapes[entry.path].shape)}")
        variables[entry.path] = array
    if wrong:
        raise ValueError(f"expected the shapes of the model in {source}, got {_listed(wrong)}; check its configuration")
    return unflatten_dict(variables, sep="/")


def to_tensors(weights: WeightMap, arrays: Mapping[str, np.ndarray]) -> Tensors:
    """Convert variables by path to tensors with the buffers of the format, the inverse of `to_variables`."""
    tensors: Tensors = dict(weights.buffers)
    for entry in weights.entries:
        array, (_, to_torch) = arrays[entry.path], _LAYOUTS[entry.layout]
        blocks = [array]
        if len(entry.names) > 1:
            bounds = np.cumsum(entry.shares) * array.shape[-1] // sum(entry.shares)
            blocks = np.split(array, bounds[:-1], axis=-1)
        tensors |= {name: to_torch(block) for name, block in zip(entry.names, blocks, strict=True)}
    return tensors


_LAYOUTS: dict[Layout, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "same": (lambda a: a, lambda a: a),
    "linear": (lambda a: a.transpose(1, 0), lambda a: a.transpose(1, 0)),  # [out, in] to [in, out]
    "conv": (
        lambda a: a.transpose(2, 3, 1, 0),
        lambda a: a.transpose(3, 2, 0, 1),
    ),  # [out, in, h, w] to [h, w, in, out]
    "unit_axis": (lambda a: a.squeeze(0), lambda a: a[None]),
    "unit_axes": (lambda a: a.squeeze((0, 1)), lambda a: a[None, None]),
    "scalar": (lambda a: a.reshape(()), lambda a: a),
}


def _to_parameter(entry: Entry, tensors: Sequence[np.ndarray]) -> np.ndarray | None:
    """Convert the tensors of one parameter; None for wrong dimensions."""
    to_jax, _ = _LAYOUTS[entry.layout]
    try:
        arrays = [to_jax(tensor) for tensor in tensors]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
    except ValueError:
        return None


def _is_buffer(array: np.ndarray, buffer: np.ndarray | None) -> bool:
    """Return whether a tensor is the constant of a format, up to rounding."""
    if buffer is None or array.shape != buffer.shape:
        return False
    rounding = 2 * float(jnp.finfo(array.dtype).eps) if jnp.issubdtype(array.dtype, jnp.floating) else 0.0
    return np.allclose(np.float32(array), buffer, rtol=0, atol=rounding)


def _default_layout(path: str, array: Any) -> Layout:
    if not path.endswith("/kernel"):
        return "same"
    return "conv" if len(array.shape) == 4 else "linear"


def _listed(names: Collection[str]) -> str:
    """Format the first few names and the count."""
    shown = ", ".join(printable(name[:_LENGTH]) for name in list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, ... ({len(names)} in all)"
