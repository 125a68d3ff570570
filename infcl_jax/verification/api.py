"""Comparison of a training set-up with the undivided loss."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.grad_cache import cached_value_and_grad
from infcl_jax.grad_cache.chunks import Array, EncodeFn, leading_rows, make_layout
from infcl_jax.ops.common.checks import check_implementation
from infcl_jax.ops.pairwise.lse import IMPLEMENTATIONS
from infcl_jax.verification.causes import Measured, SetUp, find_causes, update_causes
from infcl_jax.verification.reference import Problem, accepted_options, groups_of
from infcl_jax.verification.report import Report, VerificationError


def verify(
    loss: Callable[..., Array],
    encoders: Mapping[str, EncodeFn],
    params: Any,
    batch: Mapping[str, Any],
    *,
    mesh: Mesh | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    value_and_grad: Callable[..., tuple[Any, Any]] | None = None,
    update: Callable[[Any, Any], Any] | None = None,
    frozen: Collection[str] = (),
    rng: Array | None = None,
    rtol: float = 1e-3,
    strict: bool = False,
) -> Report:
    """Compare a distributed loss and its gradients with one undivided computation in float64.

    The reference encodes all rows on one device, computes the loss of all pairs and differentiates it, in float64. The
    set-up is `value_and_grad`, or without it `infcl_jax.cached_value_and_grad` of the arguments. If they differ, one
    change at a time is tried to name the cause; docs/verification.md lists the causes. The batch must be small, because
    the reference stores all activations, and there is one process.

    Examples:
      >>> def encode(params, rows, rng):
      ...     return l2_normalize(rows @ params, jnp.float32)
      >>> def loss(params, features, mesh=None, implementation=None):
      ...     return clip_loss(features["image"], features["text"], 14.3, mesh=mesh, implementation=implementation)
      >>> encoders, batch = {"image": encode, "text": encode}, {"image": image, "text": text}
      >>> report = infcl_jax.verify(loss, encoders, jnp.eye(4), batch, mesh=mesh, chunk_size=8)
      >>> report.ok, report.verdict
      (True, 'right: loss and gradients agree within 0.001')

    Args:
      loss: `loss(params, features)`, a floating scalar. It may take the keyword arguments `mesh` and `implementation`
        to pass on to `clip_loss`; the reference passes None and "dense".
      encoders: `{name: encode(params, rows, rng) -> features}`, see `cached_value_and_grad`. An encoder that casts to a
        lower precision does so in the reference as well.
      params: pytree of floating arrays. The groups of the report are its first keys or attributes, or those
        below "params".
      batch: `{name: pytree of arrays [b, ...]}`; entries without an encoder are features that `loss` reads.
      mesh: devices of the set-up, over all of whose axes the batch is sharded; None: one device.
      chunk_size: rows of a chunk of the set-up, over all devices; None: the whole batch.
      implementation: backend of `pairwise_lse` in the set-up that this function builds.
      value_and_grad: your own gradient function `(params, batch) -> (loss, grads)`, or `(params, batch, rng)`.
      update: your own `(params, grads) -> params`, to check that every trained group moves and no frozen one does.
      frozen: names of groups that must not move; their gradients are not compared.
      rng: key of the encoders, for dropout. `value_and_grad` must then take it, and key the encoders as documented by
        `cached_value_and_grad`.
      rtol: largest accepted error of the loss and of the gradient of each group, relative to their norm.
      strict: whether to raise on a difference.

    Returns:
      The report: a table, a verdict with the causes, and a figure.

    Raises:
      ValueError: arguments do not match each other, or the gradients do not have the structure of the parameters.
      VerificationError: with `strict`, something is wrong; the message is the report.
    """
    check_implementation(implementation, IMPLEMENTATIONS)
    if not 0 < rtol < 1:
        raise ValueError(f"expected 0 < rtol < 1, got {rtol}")
    if not encoders or set(encoders) - set(batch):
        raise ValueError(f"expected encoders with a batch entry each, got {list(encoders)} and {list(batch)}")
    devices, rows = (mesh.size if mesh else 1), leading_rows(next(iter(encoders)), batch[next(iter(encoders))])
    make_layout("the batch", rows, rows if chunk_size is None else chunk_size, devices)
    if unknown := set(frozen) - set(groups_of(params)):
        raise ValueError(f"expected frozen to name groups among {list(groups_of(params))}, got {sorted(unknown)}")
    undivided = functools.partial(loss, **accepted_options(loss, mesh=None, implementation="dense"))
    host_params, host_batch = jax.device_get((params, dict(batch)))
    problem = Problem(undivided, encoders, host_params, host_batch, devices, chunk_size or rows, rng)
    function = value_and_grad
    if function is None:
        divided = functools.partial(loss, **accepted_options(loss, mesh=mesh, implementation=implementation))
        function = _cached(divided, encoders, problem, mesh)
    set_up = SetUp(function, params, batch, _takes_rng(function, rng), rng, _rows_of(mesh))
    if rng is not None and not set_up.takes_rng:
        raise ValueError("expected value_and_grad to take rng as its third argument, got a function of two")

    expected = problem.value_and_grad()
    value, grads = set_up()
    structure: Any = jax.tree.structure(params)
    if (got := jax.tree.structure(grads)) != structure:
        raise ValueError(f"expected gradients of the structure of params, {structure}, got {got}")
    measured = Measured.compare(value, grads, expected, frozen, rtol)
    causes, notes = ((), ()) if measured.ok else find_causes(problem, set_up, measured, expected, frozen, rtol)
    if update is not None:
        causes = (*causes, *update_causes(params, update(params, grads), grads, frozen))
    report = Report(
        measured.loss, expected[0], measured.loss_error, tuple(measured.groups.values()), rtol, causes, notes
    )
    if strict and not report.ok:
        raise VerificationError(f"expected a set-up that equals the undivided loss, got\n{report}")
    return report


def _cached(
    loss: Callable[..., Array], encoders: Mapping[str, EncodeFn], problem: Problem, mesh: Mesh | None
) -> Callable[..., tuple[Any, Any]]:
    """Return the gradient function of `cached_value_and_grad`."""
    sharding = _rows_of(mesh)
    cached = jax.jit(cached_value_and_grad(encoders, loss, chunk_size=problem.chunk_size, sharding=sharding))

    def value_and_grad(params: Any, batch: Any, rng: Array | None = None) -> tuple[Any, Any]:
        if sharding is not None:
            params = jax.device_put(params, NamedSharding(sharding.mesh, PartitionSpec()))
            batch = jax.device_put(dict(batch), sharding)
        return cached(params, batch, rng)

    return value_and_grad


def _rows_of(mesh: Mesh | None) -> NamedSharding | None:
    return None if mesh is None or mesh.size == 1 else NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _takes_rng(function: Callable[..., Any], rng: Array | None) -> bool:
    """Return whether to call a gradient function with a third positional argument.

    One with a default, or of a wrapper with any number of arguments, such as `shard_map`'s, is for a key.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin or an extension type without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_number = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters)
    if rng is not None:
        return len(positional) > 2 or any_number
    return len(positional) > 2 and positional[2].default is inspect.Parameter.empty
