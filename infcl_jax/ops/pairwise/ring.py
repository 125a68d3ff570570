"""Ring strategy: column blocks rotate around the mesh while row blocks stay.

A device holds at most two blocks of column features at a time. Source: Cheng et al., "Breaking the Memory Barrier: Near
Infinite Batch Size Scaling for Contrastive Loss" (Inf-CL), section 3.3, here with both directions in one rotation. This
module contains only the collectives, to be used inside `shard_map`. The backend computes the blocks.

Several mesh axes form a hierarchical ring. Blocks go around the last axis (the devices of a host) once for each step
along the axis before it (the hosts). Few blocks then use the slow links, and each of these transfers overlaps with the
compute of a whole inner rotation. Each axis before the last needs memory for one more block of column features, and in
the backward pass for two more of their accumulators.

In the backward pass a block is split into slices: contiguous column ranges, each sent in one transfer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infcl_jax.ops.pairwise.base import (
    FP32_BYTES,
    AxisName,
    Backend,
    accumulation_dtype,
    add_trees,
    join_columns,
    round_up,
    split_columns,
    zero_after,
)

# Unrolled steps need no copies of the carry; rings with more steps are unrolled in groups of this size.
MAX_UNROLL = 16
# A block has at most MAX_SLICES slices. For GEMM throughput a slice has at least MIN_SLICE columns, or half of the
# block if that is less. Slices are multiples of SLICE_MULTIPLE columns.
MAX_SLICES = 4
MIN_SLICE = 4096
SLICE_MULTIPLE = 256

Compare = Callable[[Any, bool], tuple[Any, Any]]
Merge = Callable[[Any, Any], Any]
Accumulate = Callable[[int, Any, Any, Any, bool], tuple[Any, Any]]


def sweep(compare: Compare, columns: Any, merge: Merge, axis_name: AxisName | None) -> tuple[Any, Any]:
    """Rotate column blocks around the ring and merge local and remote contributions.

    The compute of one block overlaps with two transfers: the next block and the remote contributions of the previous
    step. Only the last transfer of the remote contributions is exposed. Use this for contributions smaller than their
    columns, such as column sums.

    Args:
      compare: `compare(columns, own) -> (local, remote)` returns the contributions to this device's rows, and to
        `columns` on the device that owns them. `own` (static) is True in the step in which this device owns them.
      columns: pytree of this device's arrays to rotate.
      merge: associative merge of two contributions of the same structure.
      axis_name: mesh axis of the ring, or several with the slowest links first; None for a single device.

    Returns:
      `(local, remote)`: all contributions, each merged on the device that owns it.
    """
    axes = ring_axes(axis_name)
    local, remote = _rotate_sweep(compare, columns, merge, axes, own=True)
    return local, _shift(remote, axes, 1)


def _rotate_sweep(compare: Compare, columns: Any, merge: Merge, axes: tuple[str, ...], *, own: bool) -> tuple[Any, Any]:
    """Rotate once around all axes, starting with the own block if `own`.

    `remote` stays on the last device that compares its block, which is one hop before its owner along every axis.
    """
    if not axes:
        return compare(columns, own)
    size, inner = lax.axis_size(axes[0]), axes[1:]

    def compare_block(columns: Any, own: bool) -> tuple[Any, Any]:
        return _rotate_sweep(compare, columns, merge, inner, own=own)

    def send(tree: Any) -> Any:
        return _shift(tree, axes[:1], 1)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        columns, remote, local = carry
        next_columns, sent = send(columns), send(remote)
        local_update, remote_update = compare_block(columns, False)
        # The barrier keeps the transfers and the compute of one step together. XLA would otherwise combine a transfer
        # with one of the next step, which starts too late to overlap.
        return lax.optimization_barrier((next_columns, merge(sent, remote_update), merge(local, local_update))), None

    next_columns = send(columns)
    local, remote = compare_block(columns, own)
    carry = lax.optimization_barrier((next_columns, remote, local))
    if size > 2:
        unroll = 1 if inner else min(size - 2, MAX_UNROLL)
        carry, _ = lax.scan(step, carry, length=size - 2, unroll=unroll)
    columns, remote, local = carry
    sent = send(remote)
    local_update, remote_update = compare_block(columns, False)
    return merge(local, local_update), merge(sent, remote_update)


def accumulate(
    compare: Accumulate, columns: Any, local: Any, remote: Any, axis_name: AxisName | None
) -> tuple[Any, Any]:
    """Rotate slices of columns and their accumulators around the ring and accumulate in place.

    Accumulators move together with their slices, so that on one axis no device stores a contribution in addition to its
    accumulator. Use this for accumulators larger than their slices, such as gradients. The next slice arrives during
    the compute of the current one, and only that slice is in memory twice. Along an axis, device r compares the blocks
    of r + 1, r + 2, ..., and its own last. Only the first transfer of the first slice is exposed, or every transfer of
    a block with a single slice.

    Args:
      compare: `compare(first, column_slice, local, remote, own) -> (local, remote)` adds the contributions of a slice,
        whose first column is number `first` (static), to the accumulators of this device and of the slice's owner.
        `own` (static) is True where this device is the owner.
      columns: pytree of this device's arrays to rotate.
      local: pytree of this device's accumulators.
      remote: pytree of zero-initialized accumulators of the columns.
      axis_name: mesh axis of the ring, or several with the slowest links first; None for a single device.

    Returns:
      `(local, remote)` with the contributions of all devices, each on the device that owns it.
    """
    axes = ring_axes(axis_name)
    if not axes:
        return compare(0, columns, local, remote, True)
    starts, slices = zip(*split((columns, remote)), strict=True)
    (first, *others), accumulators = map(list, zip(*slices, strict=True))

    def compare_slice(i: int, *arguments: Any) -> tuple[Any, Any]:
        return compare(starts[i], *arguments)

    column_slices = [_shift(first, axes, -1), *_shift(others, axes[:-1], -1)]
    local, accumulators = _rotate_accumulate(compare_slice, column_slices, local, accumulators, axes, own=True)
    return local, jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *accumulators)


def _rotate_accumulate(
    compare: Accumulate, slices: list, local: Any, remote: list, axes: tuple[str, ...], *, own: bool
) -> tuple[Any, list]:
    """Rotate once around all axes, ending with the own block if `own`.

    The first slice starts on the device that compares it first. The other slices start one hop before it along the last
    axis. `remote` stays on the last device that compares its block.
    """
    size, inner = lax.axis_size(axes[0]), axes[1:]
    if not inner:

        def flat_step(state: tuple, _: None) -> tuple[tuple, None]:
            return _step(compare, state, axes, own=False, last=False), None

        state, _ = lax.scan(flat_step, (slices, local, remote), length=size - 1)
        return _step(compare, state, axes, own=own, last=True)[1:]
    zeros = jax.tree.map(jnp.zeros_like, remote)

    def send(tree: Any) -> Any:
        return _shift(tree, axes[:1], -1)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        slices, local, remote = carry
        next_slices, sent = send(slices), send(remote)
        local, remote_update = _rotate_accumulate(compare, slices, local, zeros, inner, own=False)
        return (next_slices, local, add_trees(sent, remote_update)), None

    next_slices = send(slices)
    local, remote = _rotate_accumulate(compare, slices, local, zeros, inner, own=False)
    (slices, local, remote), _ = lax.scan(step, (next_slices, local, remote), length=size - 2)
    sent = send(remote)
    local, remote_update = _rotate_accumulate(compare, slices, local, zeros, inner, own=own)
    return local, add_trees(sent, remote_update)


def _step(
    compare: Accumulate, state: tuple[list, Any, list], axes: tuple[str, ...], *, own: bool, last: bool
) -> tuple[list, Any, list]:
    """Compare every slice once while the next one arrives.

    During the compute of the last slice, the first slice of the next step arrives, unless this is the last step. The
    state is `(slices, local, remote)`, see `accumulate`.
    """
    slices, local, remote = list(state[0]), state[1], list(state[2])

    def fetch(i: int) -> None:
        slices[i], remote[i] = _shift((slices[i], remote[i]), axes, -1, number=i)

    for i, next_slice in enumerate([*range(1, len(slices)), 0]):
        has_next, single_slice = next_slice or not last, next_slice == i
        if has_next and not single_slice:
            if i:  # after the compute of slice i - 1: one transfer in flight at a time
                slices[next_slice], remote[next_slice] = _after(remote[i - 1], (slices[next_slice], remote[next_slice]))
            fetch(next_slice)
        if i:
            slices[i] = _after((local, remote[i - 1]), slices[i])
        local, remote[i] = compare(i, slices[i], local, remote[i], own)
        if has_next and single_slice:
            fetch(i)
    return slices, local, remote


def _after(done: Any, tree: Any) -> Any:
    """Add a data dependency on `done` to the matrices of `tree`.

    The dependency is an update of row 0 with itself, at an index computed from `done`. Without it, XLA would start all
    transfers at once and merge the GEMMs of several slices.
    """
    if not jax.tree.leaves(done):
        return tree
    zero = zero_after(done)
    return jax.tree.map(lambda a: lax.dynamic_update_slice_in_dim(a, a[:1], zero, 0) if a.ndim > 1 else a, tree)


def split(tree: Any) -> list[tuple[int, Any]]:
    """Split a pytree of column arrays into slices.

    Each slice comes with the index of its first column. The first array has the columns without padding; the last slice
    contains the padding of accumulators.
    """
    columns = jax.tree.leaves(tree)[0].shape[0]
    width = slice_columns(columns)

    def columns_from(n: int) -> Any:
        stop = None if n + width >= columns else n + width
        return jax.tree.map(lambda a: a[n:stop], tree)

    return [(n, columns_from(n)) for n in range(0, columns, width)]


def slice_columns(columns: int) -> int:
    """Return the number of columns of a slice; the last slice may have fewer."""
    return min(columns, round_up(max(-(-columns // MAX_SLICES), min(-(-columns // 2), MIN_SLICE)), SLICE_MULTIPLE))


def rotating_bytes(rows: int, width: int, dtype: Any, devices: int) -> int:
    """Bytes of the rotating columns on each device of a ring along one axis.

    These are a block of `rows` columns, the second buffer of one slice and that slice's fp32 accumulators.
    """
    if devices == 1:
        return 0
    itemsize, columns = jnp.dtype(dtype).itemsize, slice_columns(rows)
    return ((rows + columns) * itemsize + columns * FP32_BYTES) * width


def ring_axes(axis_name: AxisName | None) -> tuple[str, ...]:
    """Return the mesh axes with several devices, slowest links first."""
    axes = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    return tuple(axis for axis in axes if lax.axis_size(axis) > 1)


def _shift(tree: Any, axes: tuple[str, ...], by: int, number: int = 0) -> Any:
    """Send arrays to the device whose coordinates along `axes` are larger by `by`.

    XLA combines permutes with identical lists of device pairs. `number` rotates the list, so that transfers of
    different slices stay separate.
    """
    if not axes:
        return tree
    sizes = tuple(lax.axis_size(axis) for axis in axes)
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    targets = np.asarray(np.ravel_multi_index(tuple(coordinates + by), sizes, mode="wrap"))
    pairs = np.roll(list(enumerate(targets.tolist())), number, axis=0).tolist()
    return jax.tree.map(lambda a: lax.ppermute(a, axes, pairs), tree)


def forward(backend: Backend, block: Any, *, axis_name: AxisName | None) -> Any:
    """Compute the sums of this device's rows and columns over all devices.

    Args:
      backend: computes one block.
      block: this device's rows and columns, see `base.Block`.
      axis_name: mesh axis (or axes) of the ring, see `sweep`; None for one device.
    """

    def compare(columns: tuple, own: bool) -> tuple[Any, tuple]:
        return split_columns(backend.forward(block.with_columns(columns, 0 if own else None)))

    return join_columns(*sweep(compare, split_columns(block)[1], _merge, axis_name))


def backward(backend: Backend, block: Any, cotangents: Any, *, axis_name: AxisName | None, needs_grad: Any) -> Any:
    """Compute the gradients of this device's rows, columns and scalars.

    The column accumulators rotate with the columns.

    Args:
      backend: computes one block.
      block: this device's rows and columns.
      cotangents: forward results and cotangents of this device's rows and columns.
      axis_name: mesh axis (or axes) of the ring, see `sweep`; None for one device.
      needs_grad: flags of the required gradients.

    Returns:
      Gradients. Those of the features are in the accumulation dtype, or in the features' dtype on a single device.
    """
    # Gradients accumulated over ring steps need fp32. On a single device they are rounded once, without an fp32 copy.
    dtype = accumulation_dtype(block.x.dtype) if ring_axes(axis_name) else block.x.dtype
    init, init_columns = split_columns(backend.accumulators(block, needs_grad, dtype))

    def compare(first: int, column_slice: tuple, local: Any, remote: tuple, own: bool) -> tuple[Any, tuple]:
        columns, column_cotangents = column_slice
        step_block = block.with_columns(columns, first if own else None)
        step_cotangents = join_columns(cotangents, column_cotangents)
        return split_columns(backend.backward(step_block, step_cotangents, join_columns(local, remote)))

    operands = split_columns(block)[1], split_columns(cotangents)[1]
    acc = join_columns(*accumulate(compare, operands, init, init_columns, axis_name))
    return backend.gradient(block, cotangents, acc, needs_grad)


def _merge(a: Any, b: Any) -> Any:
    """Merge sums that have a method for it, and add all other leaves."""

    def has_merge(value: Any) -> bool:
        return hasattr(value, "merge")

    return jax.tree.map(lambda a, b: a.merge(b) if has_merge(a) else a + b, a, b, is_leaf=has_merge)
