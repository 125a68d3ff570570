"""Frozen parameters: whole towers, or all but the last groups of a tower.

A module with a frozen parameter runs in inference mode: batch normalization uses its running statistics, and dropout
and patch dropout are off. The other modules run in training mode.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from infcl_jax.models import TOWERS, towers_of
from infcl_jax.models.depth import distances_to_output
from infcl_jax.ops.common.checks import check_choice
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.schema import Range, Section, setting

_SEPARATOR = "/"


def parameter_groups(tower: Mapping[str, Any]) -> list[list[str]]:
    """Group the parameters of a tower by depth, as OpenCLIP 3.3.0.

    The first group of a transformer has the embeddings and the input LayerNorm. Each block is a group; the last block's
    has the final LayerNorm too. All other parameters, such as attention pool and projection, are the last group.
    The groups of a ResNet, which OpenCLIP locks as a whole only, are the stem, the four stages and the attention pool.

    Examples:
      >>> groups = parameter_groups(variables["params"]["visual"])
      >>> len(groups), groups[-1]  # embeddings, one block, projection
      (3, ['proj/kernel'])

    Args:
      tower: parameters of a tower.

    Returns:
      Names of the parameters of each group, such as "proj/kernel".
    """
    groups: dict[int, list[str]] = {}
    for name, distance in distances_to_output(flatten_dict(tower, sep=_SEPARATOR), stages=True).items():
        groups.setdefault(distance, []).append(name)
    return [groups[distance] for distance in sorted(groups, reverse=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlockedGroups(Section, prefix="unlocked_groups.", shapes=True):
    """Number of trained groups at the end of each frozen tower, see `parameter_groups`.

    A tower with fewer groups is trained as a whole.

    Examples:
      >>> unlocked = UnlockedGroups(image=1)  # the projection
      >>> names = frozen_parameters(variables["params"], ["image"], unlocked)
      >>> "visual/proj/kernel" in names, "visual/conv1/kernel" in names
      (False, True)

    Raises:
      ValueError: a number is negative.
    """

    image: int = setting(
        0,
        "last groups of the frozen image tower that are trained, as --lock-image-unlocked-groups of OpenCLIP",
        Range(0),
    )
    text: int = setting(
        0,
        "last groups of the frozen text tower that are trained, as --lock-text-unlocked-layers of OpenCLIP",
        Range(0),
    )


ALL_LOCKED = UnlockedGroups()


def check_frozen(frozen: Collection[str], unlocked: UnlockedGroups) -> None:
    """Raise `ValueError` for an unknown tower, or unlocked groups of a tower that is not frozen."""
    for name in frozen:
        check_choice("frozen", name, tuple(TOWERS))
    for name, count in dataclasses.asdict(unlocked).items():
        if count and name not in frozen:
            raise ValueError(
                f"expected {name!r} in frozen with unlocked_groups.{name}={count}, got {tuple(frozen)}; "
                "only a frozen tower has unlocked groups"
            )


def frozen_parameters(
    params: Mapping[str, Any], frozen: Collection[str], unlocked: UnlockedGroups = ALL_LOCKED
) -> frozenset[str]:
    """List the frozen parameters of a model.

    Examples:
      >>> names = frozen_parameters(variables["params"], ["image"])
      >>> "visual/conv1/kernel" in names
      True

    Args:
      params: parameters of a `CLIP` model, arrays or shapes.
      frozen: frozen towers, "image" or "text" (LiT, Zhai et al. 2022).
      unlocked: trained groups of the frozen towers.

    Returns:
      Names such as "visual/proj/kernel".

    Raises:
      ValueError: see `check_frozen`.
    """
    check_frozen(frozen, unlocked)
    names = []
    for tower in frozen:
        groups = parameter_groups(params[TOWERS[tower]])
        for group in groups[: max(0, len(groups) - getattr(unlocked, tower))]:
            names += [f"{TOWERS[tower]}{_SEPARATOR}{name}" for name in group]
    return frozenset(names)


def frozen_towers(params: Mapping[str, Any], frozen: Collection[str]) -> tuple[str, ...]:
    """List the towers whose parameters all have names in `frozen`."""
    trained, _ = partition(params, frozen)
    return tuple(name for name, subtree in towers_of(params).items() if subtree not in trained)


def partition(params: Mapping[str, Any], frozen: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split nested dicts of parameters into trained and `frozen` ones, which `merge` joins again."""
    trained: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name, leaf in flatten_dict(params, sep=_SEPARATOR).items():
        (fixed if name in frozen else trained)[name] = leaf
    return unflatten_dict(trained, sep=_SEPARATOR), unflatten_dict(fixed, sep=_SEPARATOR)


def merge(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Join trees of nested dicts; later trees replace leaves of earlier ones."""
    flat: dict[str, Any] = {}
    for tree in trees:
        flat |= flatten_dict(tree, sep=_SEPARATOR)
    return unflatten_dict(flat, sep=_SEPARATOR)


def updates_statistics(params: Mapping[str, Any], statistics: Any, frozen: Collection[str]) -> bool:
    """Return whether a batch normalization is in training mode."""
    modules = {path[:-1] for path in flatten_dict(statistics or {})}
    return bool(modules - _prefixes(partition(params, frozen)[1]))


def module_modes(params: Mapping[str, Any], frozen: Collection[str]) -> contextlib.AbstractContextManager[None]:
    """Set the mode of each module of a Flax model by its parameters.

    Inside the context, calls of the model in training mode pass `train=False` to modules with a frozen parameter and
    `train=True` to those with trained parameters alone. Modules without parameters get the value of their caller.
    """
    if not frozen:
        return contextlib.nullcontext()
    trained_modules, frozen_modules = (_prefixes(tree) for tree in partition(params, frozen))

    def call(next_fun: Callable, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        path, signature = context.module.path, inspect.signature(context.orig_method)
        if "train" in signature.parameters and path in trained_modules | frozen_modules:
            bound = signature.bind(*args, **kwargs)  # `nn.remat` needs `train` at its position
            bound.arguments["train"] = path not in frozen_modules
            args, kwargs = bound.args, bound.kwargs
        return next_fun(*args, **kwargs)

    return nn.intercept_methods(call)


def _prefixes(params: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Return the paths of the modules above the parameters."""
    return {path[:depth] for path in flatten_dict(params) for depth in range(len(path))}


class PrecomputedFeatures(NamedTuple):
    """Batch entry of a frozen tower: normalized features [b, D] in place of images or texts."""

    features: Any


def frozen_encoder(
    apply_fn: Callable[..., Any], variables: Mapping[str, Any], name: str, devices: Sequence[jax.Device]
) -> Callable[[np.ndarray], np.ndarray]:
    """Create an encoder of a frozen model, such as "image" or "query", on devices of this process.

    Returns:
      A function from rows, which the devices can share evenly, to features [rows, D] in the model's feature dtype.
    """
    mesh = data_mesh(devices)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    placed = jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))

    @functools.partial(jax.jit, out_shardings=sharding)
    def encode(variables: Any, rows: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return apply_fn(variables, rows, method=f"encode_{name}")

    return lambda rows: np.asarray(encode(placed, jax.device_put(rows, sharding)))


def tower_variables(variables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Select the parameters and running statistics of an encoder, such as "image" or "query"."""
    subtree = towers_of(variables["params"])[name]
    return {collection: {subtree: tree[subtree]} for collection, tree in variables.items() if subtree in tree}
