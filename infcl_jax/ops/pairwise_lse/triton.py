"""Fused Triton kernels through jax-triton, for Ampere, Ada and Hopper GPUs.

On Hopper they are an alternative to the Mosaic GPU kernels. One main loop and one epilogue serve every kernel. A
program computes one tile of similarities in registers and converts it to partial sums (forward) or to a tile of dS
(backward). Two programs fit on an SM, so that the exponentials of one overlap with the GEMM of the other. Every output
element is written by exactly one program, so results are bitwise reproducible.

Triton and jax-triton are imported at the first kernel call.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from infcl_jax.ops.pairwise_lse.base import Array, as_varying
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Operands, Pairs, Weights, Window

INSTALL = "install them with: pip install 'jax-triton>=0.4.1' 'triton>=3.7'"
# PTX version of the generated code: the oldest with support for these GPUs, which any driver since CUDA 12.0 accepts.
PTX_VERSION = 80


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of the main loop.

    Attributes:
      rows: rows of a tile.
      columns: columns of a tile.
      depth: features of one step.
      stages: pipeline stages.
      warps: warps of one program.
      group: row tiles per group of the tile order, for L2 reuse.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    stages: int = 3
    warps: int = 4
    group: int = 8


# Keys are the lowest compute capability. Two programs fit in an SM's SMEM: 164 KiB (8.0), 100 KiB (8.6, 8.9) or 228 KiB
# (9.0).
TILES = {
    80: Tiles(),
    86: Tiles(depth=32, stages=4),
    90: Tiles(group=32),
}


@dataclasses.dataclass(frozen=True)
class TritonKernels:
    """Implements `fused_kernel_api.Kernels` for GPUs from Ampere to Hopper.

    The gradients are library GEMMs.

    Attributes:
      tiles: tile sizes of the sums and of dS.
      compute_capability: 10 * major + minor of the GPU.
    """

    tiles: Tiles
    compute_capability: int

    @classmethod
    def for_capability(cls, capability: str) -> "TritonKernels":
        """Creates the kernels for a CUDA compute capability.

        Raises:
          ValueError: the GPU is not Ampere, Ada or Hopper.
        """
        number = int(capability.replace(".", ""))
        if not 80 <= number <= 90:
            raise ValueError(f"expected a GPU of compute capability 8.0 to 9.0, got {capability}")
        return cls(TILES[max(c for c in TILES if c <= number)], number)

    @property
    def tile(self) -> tuple[int, int]:
        """Row and column multiples of every window.

        Both are equal, so that tiles on the diagonal are complete.
        """
        size = max(self.tiles.rows, self.tiles.columns)
        return size, size

    @property
    def depth(self) -> int:
        """Multiple to which the number of features is padded."""
        return self.tiles.depth

    def sums(
        self, operands: Operands, window: Window, pairs: Pairs, *, exclude: bool, columns: bool, maxima: bool
    ) -> tuple[Array, Array | None]:
        """Implements `Kernels.sums`."""
        operands = operands if exclude else operands._replace(labels=None)
        wanted = {"row_parts": True, "column_parts": columns}
        found = self._sweep(operands, None, window, pairs, wanted, EXCLUDE=exclude, MAXIMA=maxima)
        reduce = jnp.max if maxima else jnp.sum
        return reduce(found["row_parts"], 0), reduce(found["column_parts"], 0) if columns else None

    def weights(
        self,
        operands: Operands,
        weights: Weights,
        window: Window,
        pairs: Pairs,
        *,
        exclude: bool,
        terms: int,
        moments: bool,
    ) -> tuple[Array, Array | None, Array | None]:
        """Implements `Kernels.weights`."""
        if self.tiles.rows * terms * window.columns >= 1 << 31:
            raise ValueError(f"expected a window whose tiles of dS span less than 2^31 elements, got {window}")
        column_moment = moments and weights.column is not None
        wanted = {"row_parts": moments, "column_parts": column_moment, "d_s": True}
        found = self._sweep(operands, weights, window, pairs, wanted, EXCLUDE=exclude, D_S_PARTS=terms)
        row = found["row_parts"].sum(0) if moments else None
        return found["d_s"], row, found["column_parts"].sum(0) if column_moment else None

    def positives(self, x: Array, y: Array, pairs: Pairs) -> Array:
        """Implements `Kernels.positives`."""
        rows = x.shape[0]
        tiles = rows // min(self.tiles.rows, self.tiles.columns)
        out = {"s_ii": jax.ShapeDtypeStruct((rows,), jnp.float32)}
        return self._call("diagonal", tiles, (rows, rows), {"x": x, "y": y}, out, pairs, self.tiles.warps)["s_ii"]

    def _sweep(
        self,
        operands: Operands,
        weights: Weights | None,
        window: Window,
        pairs: Pairs,
        wanted: dict[str, bool],
        EXCLUDE: bool,
        MAXIMA: bool = False,
        D_S_PARTS: int = 0,
    ) -> dict[str, Array]:
        """Computes all tiles of a window.

        Sums and maxima are per tile, to be reduced over the first axis.
        """
        size = window.rows, window.columns
        row_tiles, column_tiles = size[0] // self.tiles.rows, size[1] // self.tiles.columns
        out = {
            "row_parts": jax.ShapeDtypeStruct((column_tiles, size[0]), jnp.float32),
            "column_parts": jax.ShapeDtypeStruct((row_tiles, size[1]), jnp.float32),
            "d_s": jax.ShapeDtypeStruct((size[0], D_S_PARTS * size[1]), jnp.bfloat16),
        }
        row, column, positive = (None, None, None) if weights is None else weights
        return self._call(
            "sweep",
            row_tiles * column_tiles,
            size,
            {
                **{name: a for name, a in operands._asdict().items() if name not in ("lowest", "highest")},
                "row_weight": row,
                "column_weight": column,
                "positive_weight": positive,
                "window": jnp.stack(
                    [jnp.asarray(n, jnp.int32) for n in (window.row, window.column, row_tiles, column_tiles)]
                ),
                **{name: None for name in out if not wanted.get(name)},
            },
            {name: kind for name, kind in out.items() if wanted.get(name)},
            pairs,
            # Two exponentials, or two parts of dS, need twice the registers, hence twice the warps.
            self.tiles.warps * (1 if operands.column_scale is None and D_S_PARTS < 2 else 2),
            GROUP=self.tiles.group,
            EXCLUDE=EXCLUDE,
            MAXIMA=MAXIMA,
            D_S_PARTS=D_S_PARTS,
        )

    def _call(
        self,
        kernel: str,
        tiles: int,
        size: tuple[int, int],
        operands: dict[str, Array | None],
        out: dict[str, jax.ShapeDtypeStruct],
        pairs: Pairs,
        warps: int,
        **constants: int,
    ) -> dict[str, Array]:
        """Calls a kernel with operands and results by parameter name."""
        t, width = self.tiles, operands["x"].shape[1]
        features = width // (1 + max(p for p, _ in pairs))
        if size[0] % t.rows or size[1] % t.columns or features % t.depth:
            raise ValueError(
                f"expected rows, columns and features in multiples of {(t.rows, t.columns, t.depth)}, "
                f"got {(*size, features)}"
            )
        jax_triton, kernels = _load()
        found = jax_triton.triton_call(
            kernel=kernels[kernel],
            out_type=tuple(out.values()),
            grid=(tiles,),
            name=f"pairwise_{kernel}",
            num_warps=warps,
            num_stages=t.stages,
            compute_capability=self.compute_capability,
            backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
            cost_estimate={"flops": 2 * tiles * t.rows * t.columns * features * len(pairs)},
            **operands,
            **constants,
            FEATURES=features,
            WIDTH=width,
            PAIRS=len(pairs),
            X_PARTS=_digits([p for p, _ in pairs]),
            Y_PARTS=_digits([q for _, q in pairs]),
            ROWS=t.rows,
            COLUMNS=t.columns,
            DEPTH=t.depth,
        )
        # jax-triton drops the varying mesh axes of its operands.
        varying = frozenset().union(
            *(jax.typeof(a).manual_axis_type.varying for a in operands.values() if a is not None)
        )
        return {name: as_varying(a, varying) for name, a in zip(out, found, strict=True)}


def _digits(parts: list[int]) -> int:
    """Packs the numbers into hexadecimal digits, the first one lowest."""
    return sum(part << 4 * place for place, part in enumerate(parts))


@functools.cache
def _load() -> tuple[Any, dict[str, Any]]:
    """Returns the module jax_triton and the kernels by name.

    Raises:
      ImportError: a package is missing, or its version silently computes nothing.
    """
    try:
        import triton
        from triton import language as tl
    except ImportError as e:
        raise ImportError(f"the Triton kernels need jax-triton >= 0.4.1 and triton >= 3.7; {INSTALL}") from e
    version = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
    if version < (3, 7):
        raise ImportError(f"the Triton kernels need triton >= 3.7, got {triton.__version__}; {INSTALL}")
    try:
        import jax_triton
    except ImportError as e:
        raise ImportError(f"the Triton kernels need jax-triton >= 0.4.1; {INSTALL}") from e

    @triton.jit
    def similarities(
        x,
        y,
        row,
        column,
        FEATURES: tl.constexpr,
        WIDTH: tl.constexpr,
        PAIRS: tl.constexpr,
        X_PARTS: tl.constexpr,
        Y_PARTS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
    ):
        """Computes one tile of s `[ROWS, COLUMNS]`.

        A single loop covers the steps of all pairs of parts.
        """
        k = tl.arange(0, DEPTH)
        x += row.to(tl.int64) * WIDTH + tl.arange(0, ROWS)[:, None] * WIDTH + k[None, :]
        y += column.to(tl.int64) * WIDTH + tl.arange(0, COLUMNS)[None, :] * WIDTH + k[:, None]
        s = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(PAIRS * FEATURES // DEPTH):
            digit = step // (FEATURES // DEPTH) * 4
            offset = step % (FEATURES // DEPTH) * DEPTH
            x_k = ((X_PARTS >> digit) & 15) * FEATURES + offset
            y_k = ((Y_PARTS >> digit) & 15) * FEATURES + offset
            s = tl.dot(tl.load(x + x_k), tl.load(y + y_k), s)
        return s

    @triton.jit
    def finish(
        s, row_tile, column_tile, row_tiles, column_tiles, k, c, d, q, row_masked, column_masked,
        a, b, w, label, row_parts, column_parts, d_s,
        EXCLUDE: tl.constexpr,
        MAXIMA: tl.constexpr,
        D_S_PARTS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Epilogue of `sweep`.

        `label` is relative to the tile; None for a tile without positives.
        """
        row = tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        rows = row_tiles.to(tl.int64) * ROWS
        columns = column_tiles.to(tl.int64) * COLUMNS
        positive = None if label is None else label[:, None] == column[None, :]

        reference = c[:, None]
        if q is not None:
            reference += column_masked[None, :]
        elif d is not None:
            reference += d[None, :]
        e = s * k[:, None] - reference
        if EXCLUDE and positive is not None:
            e = tl.where(positive, float("-inf"), e)
        e = e if MAXIMA else tl.exp2(e)
        if row_parts is not None:
            total = tl.max(e, 1) if MAXIMA else tl.sum(e if a is None else e * s, 1)
            tl.store(row_parts + column_tile * rows + row_tile * ROWS + row, total)
        if d_s is not None:
            weighted = e * (a[:, None] if b is None or q is not None else a[:, None] + b[None, :])
        if q is not None and (column_parts is not None or b is not None):
            e = s * q[None, :] - (d[None, :] + row_masked[:, None])
            if EXCLUDE and positive is not None:
                e = tl.where(positive, float("-inf"), e)
            e = e if MAXIMA else tl.exp2(e)
            if b is not None:
                weighted += e * b[None, :]
        if column_parts is not None:
            total = tl.max(e, 0) if MAXIMA else tl.sum(e if a is None else e * s, 0)
            tl.store(column_parts + row_tile * columns + column_tile * COLUMNS + column, total)
        if d_s is not None:
            if positive is not None and w is not None:
                weighted += tl.where(positive, w[:, None], 0.0)
            d_s += row_tile * ROWS * columns * D_S_PARTS + column_tile * COLUMNS
            at = row[:, None] * (column_tiles * COLUMNS * D_S_PARTS) + column[None, :]
            for _ in tl.static_range(D_S_PARTS):
                part = weighted.to(tl.bfloat16)
                tl.store(d_s + at, part)
                weighted -= part.to(tl.float32)
                d_s += columns

    @triton.jit
    def sweep(
        x, y, row_scale, row_reference, column_reference, column_scale, row_masked, column_masked, labels,
        row_weight, column_weight, positive_weight, window, row_parts, column_parts, d_s,
        GROUP: tl.constexpr,
        EXCLUDE: tl.constexpr,
        MAXIMA: tl.constexpr,
        D_S_PARTS: tl.constexpr,
        FEATURES: tl.constexpr,
        WIDTH: tl.constexpr,
        PAIRS: tl.constexpr,
        X_PARTS: tl.constexpr,
        Y_PARTS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
    ):  # fmt: skip
        """Computes one tile of sums or maxima, or of dS with moments.

        Without `row_weight` the results are sums of e or maxima of its exponents, else dS and sums of e * s.
        """
        row_tiles = tl.load(window + 2)
        column_tiles = tl.load(window + 3)
        tile = tl.program_id(0)
        row_tile, column_tile = tl.swizzle2d(
            tile // column_tiles, tile % column_tiles, row_tiles, column_tiles, GROUP
        )  # fmt: skip
        first_row = tl.load(window) + row_tile * ROWS
        first_column = tl.load(window + 1) + column_tile * COLUMNS
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        # Loaded before the main loop to hide the latency.
        k = tl.load(row_scale + row)
        c = tl.load(row_reference + row)
        d = None if column_reference is None else tl.load(column_reference + column)
        q = None if column_scale is None else tl.load(column_scale + column)
        row_masked = None if row_masked is None else tl.load(row_masked + row)
        column_masked = None if column_masked is None else tl.load(column_masked + column)
        a = None if row_weight is None else tl.load(row_weight + row)
        b = None if column_weight is None else tl.load(column_weight + column)
        w = None if positive_weight is None else tl.load(positive_weight + row)
        s = similarities(
            x, y, first_row, first_column, FEATURES, WIDTH, PAIRS, X_PARTS, Y_PARTS, ROWS, COLUMNS, DEPTH
        )  # fmt: skip
        if labels is None:
            finish(
                s, row_tile, column_tile, row_tiles, column_tiles, k, c, d, q, row_masked, column_masked,
                a, b, w, None, row_parts, column_parts, d_s, EXCLUDE, MAXIMA, D_S_PARTS, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            # Few tiles contain positives. Only these compare every pair with the labels.
            label = tl.load(labels + row) - first_column
            if tl.max(((label >= 0) & (label < COLUMNS)).to(tl.int32), 0) > 0:
                finish(
                    s, row_tile, column_tile, row_tiles, column_tiles, k, c, d, q, row_masked, column_masked,
                    a, b, w, label, row_parts, column_parts, d_s, EXCLUDE, MAXIMA, D_S_PARTS, ROWS, COLUMNS,
                )  # fmt: skip
            else:
                finish(
                    s, row_tile, column_tile, row_tiles, column_tiles, k, c, d, q, row_masked, column_masked,
                    a, b, w, None, row_parts, column_parts, d_s, EXCLUDE, MAXIMA, D_S_PARTS, ROWS, COLUMNS,
                )  # fmt: skip

    @triton.jit
    def diagonal(
        x,
        y,
        s_ii,
        FEATURES: tl.constexpr,
        WIDTH: tl.constexpr,
        PAIRS: tl.constexpr,
        X_PARTS: tl.constexpr,
        Y_PARTS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
    ):
        """Computes the part of the diagonal in one tile."""
        start = tl.program_id(0) * min(ROWS, COLUMNS)
        first_row = start // ROWS * ROWS
        first_column = start // COLUMNS * COLUMNS
        s = similarities(
            x, y, first_row, first_column, FEATURES, WIDTH, PAIRS, X_PARTS, Y_PARTS, ROWS, COLUMNS, DEPTH
        )  # fmt: skip
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        found = tl.sum(tl.where(row[:, None] == column[None, :], s, 0.0), 1)
        tl.store(s_ii + row, found, mask=(row >= start) & (row < start + min(ROWS, COLUMNS)))

    return jax_triton, {f.__name__: f for f in (similarities, finish, sweep, diagonal)}
