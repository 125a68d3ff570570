"""Positives by id in the Hopper kernels: their sums and terms of dS."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float32

from infcl_jax.ops.pairwise.base import Array, as_varying, round_up
from infcl_jax.ops.pairwise.fused_operands import pad_to
from infcl_jax.ops.pairwise.kernel_api import Pairs, Window
from infcl_jax.ops.pairwise.lse.kernel_api import LseOperands, LseWeights, positive_tiles
from infcl_jax.ops.pairwise.mosaic import MosaicKernels, subtile_offsets, window_start
from infcl_jax.ops.pairwise.mosaic_mainloop import run
from infcl_jax.ops.pairwise.mosaic_schedule import (
    ROW_LAYOUT,
    SUBTILE,
    Tiles,
    WorkTile,
    broadcast,
)


def positive_sums(
    kernels: MosaicKernels, tiles: Tiles, operands: LseOperands, pairs: Pairs, *, maxima: bool
) -> tuple[Float32[Array, "bx"], Float32[Array, "bx"], Float32[Array, "bx"]]:
    """Implement `LseKernels.positive_sums` with the given tiles, in a band of tiles."""
    operands, rows = _padded(operands, tiles), operands.x.shape[0]
    window = Window(jnp.int32(0), jnp.int32(0), len(operands.x), len(operands.y))
    schedule = kernels.schedule(tiles, window, operands.x, pairs, band=True)
    first, number = positive_tiles(operands, tiles.cta_rows, tiles.columns)
    vectors = ("row_scale", "row_shift")
    names = ("maximum" if maxima else "sum", "similarity", "moment")
    starts = [(k, i) for k in range(len(names)) for i in subtile_offsets(tiles.rows)]

    def init(work: WorkTile) -> tuple[Array, ...]:
        values = (-jnp.inf if maxima and k == 0 else 0.0 for k, _ in starts)
        return tuple(plgpu.layout_cast(jnp.full((SUBTILE,), value, jnp.float32), ROW_LAYOUT) for value in values)

    def prefetch(work: WorkTile) -> list[tuple[Array, ...]]:
        return [tuple(work.load_rows(name, i) for name in vectors) for i in subtile_offsets(tiles.rows)]

    def epilogue(work: WorkTile, s: Array, rows: list[tuple], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc = dict(zip(starts, carry, strict=True))
        for i, (scale, shift) in zip(subtile_offsets(tiles.rows), rows, strict=True):
            for j in subtile_offsets(tiles.columns):
                s_ij, is_positive = s[i : i + SUBTILE, j : j + SUBTILE], work.is_positive(i, j, work.first_column)
                z = s_ij * broadcast(scale, 0) - broadcast(shift, 0)
                s_ij = jnp.where(is_positive, s_ij, jnp.zeros_like(s_ij))
                e = jnp.exp2(jnp.where(is_positive, z, jnp.full_like(z, -jnp.inf)))
                if maxima:
                    z = jnp.where(is_positive, z, jnp.full_like(z, -jnp.inf))
                    acc[0, i] = jnp.maximum(acc[0, i], z.max(1))
                else:
                    acc[0, i] = acc[0, i] + e.sum(1)
                acc[1, i] = acc[1, i] + s_ij.sum(1)
                acc[2, i] = acc[2, i] + (e * s_ij).sum(1)
        return tuple(acc.values())

    def finalize(work: WorkTile, carry: tuple[Array, ...]) -> None:
        for (k, i), value in zip(starts, carry, strict=True):
            work.refs[names[k]][pl.ds(work.row + i, SUBTILE)] = value

    fields = ("x", "y", *vectors, "labels", "last")
    named = (
        window_start(window)
        | {name: getattr(operands, name) for name in fields}
        | {"band_first": first, "band_tiles": number}
    )
    shape = jax.ShapeDtypeStruct(operands.x.shape[:1], jnp.float32)
    out = run(
        schedule,
        named,
        dict.fromkeys(names, shape),
        init=init,
        prefetch=prefetch,
        epilogue=epilogue,
        finalize=finalize,
    )
    varying = jax.typeof(operands.x).manual_axis_type.varying  # `plgpu.kernel` drops these axes from its results
    sums, similarity, moment = (as_varying(out[name][:rows], varying) for name in names)
    return sums, similarity, moment


def _padded(operands: LseOperands, tiles: Tiles) -> LseOperands:
    """Pad rows and columns to whole tiles."""

    def pad(array: Array, multiple: int, value: int = 0) -> Array:
        return pad_to(array, (round_up(array.shape[0], multiple), *array.shape[1:]), value)

    rows = tiles.cta_rows
    return operands._replace(
        x=pad(operands.x, rows),
        y=pad(operands.y, tiles.columns),
        row_scale=pad(operands.row_scale, rows),
        row_shift=pad(operands.row_shift, rows),
        labels=pad(operands.labels, rows, -1),
        last=pad(operands.last, rows, -1),
    )


def named_weights(weights: LseWeights) -> dict[str, Array]:
    """Return the weights of dS by operand name."""
    *fields, by_id = weights._asdict().items()
    named = {f"{name}_weight": weight for name, weight in fields}
    if by_id[1] is not None:
        named |= {f"positive_{name}": weight for name, weight in by_id[1]._asdict().items()}
    return {name: weight for name, weight in named.items() if weight is not None}


def ds_by_id(
    work: WorkTile,
    weigh: Callable[[Array, Array | None], Array],
    exponentials: tuple[Array, Array | None],
    s: Array,
    i: int,
    j: int,
    *,
    overwrite: bool,
) -> Array:
    """Compute dS of a subtile with positives by id.

    Args:
      work: tile of the warpgroup.
      weigh: computes dS without the positives' terms from the exponentials of rows and columns.
      exponentials: of rows and of columns; the latter are None with a shared scale.
      s: similarities.
      i: first row of the subtile in the tile.
      j: first column of the subtile in the tile.
      overwrite: whether dS is the positives' terms at the positives, which excludes them from the sums.
    """

    first = work.first_column

    def changed(s: Array, exponentials: tuple) -> Array:
        ds = weigh(*exponentials)
        terms = _positive_terms(work, s, exponentials[0], i, j)
        return jnp.where(work.is_positive(i, j, first), terms if overwrite else ds + terms, ds)

    return work.if_positive(i, first, changed, lambda s, exponentials: weigh(*exponentials), s, exponentials)


def _positive_terms(work: WorkTile, s: Array, e: Array, i: int, j: int) -> Array:
    """Compute the positives' terms of dS, see `kernel_api.WeightsByID`."""

    def row(name: str) -> Array:
        return broadcast(work.load_rows(name, i), 0)

    def column(name: str) -> Array:
        return broadcast(work.load_columns(name, j), 1)

    has_column = "positive_column" in work.refs
    if "positive_scale" in work.refs:
        weight, d_sum = row("positive_row"), row("positive_row_sum")
        if has_column:
            weight, d_sum = weight + column("positive_column"), d_sum + column("positive_column_sum")
        return jnp.where(weight == 0, jnp.zeros_like(e), e * weight) + d_sum * work.refs["positive_scale"][0]
    e = jnp.exp2(s * row("row_scale") - row("positive_row_shift"))
    terms = e * row("positive_row") + row("positive_row_sum")
    if has_column:
        e = jnp.exp2(s * column("column_scale") - column("positive_column_shift"))
        terms = terms + (e * column("positive_column") + column("positive_column_sum"))
    return terms
