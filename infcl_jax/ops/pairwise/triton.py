"""Triton kernels through jax-triton, for Ampere, Ada and Hopper GPUs: configuration and launch.

On Hopper they are an alternative to the Mosaic GPU kernels. One main loop serves every kernel, see `triton_kernels`. A
program computes one tile of similarities in registers and converts it to partial sums (forward) or to a tile of dS
(backward). Two programs fit on an SM, so that the exponentials of one overlap with the GEMM of the other. Every output
element is written by exactly one program, so results are bitwise reproducible.

Triton and jax-triton are imported at the first kernel call.
"""

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise.base import Array, as_varying
from infcl_jax.ops.pairwise.kernel_api import Pairs, Window, term_width

INSTALL = "install them with: pip install 'jax-triton>=0.4.1' 'triton>=3.7'"
# PTX version of the generated code: the oldest with support for these GPUs, which any driver since CUDA 12.0 accepts.
PTX_VERSION = 80


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Block sizes and launch parameters of the kernels, named as in Triton.

    Attributes:
      block_m: rows of a tile.
      block_n: columns of a tile.
      block_d: features of one step.
      num_stages: pipeline stages.
      num_warps: warps of one program.
      group_m: row tiles per group of the tile order, for L2 reuse.
    """

    block_m: int = 128
    block_n: int = 128
    block_d: int = 64
    num_stages: int = 3
    num_warps: int = 4
    group_m: int = 8


# Keys are the lowest compute capability. Two programs fit in an SM's SMEM: 164 KiB (8.0), 100 KiB (8.6, 8.9) or 228 KiB
# (9.0).
CONFIGS = {
    80: TritonConfig(),
    86: TritonConfig(block_d=32, num_stages=4),
    90: TritonConfig(group_m=32),
}


class Gemm(NamedTuple):
    """GEMM of a kernel's similarities.

    Attributes:
      width: padded number of features.
      stride: elements between rows of its operands, which are concatenated bf16 terms of `width` features.
      num_pairs: pairs of bf16 terms whose GEMMs are summed.
      x_terms: index of each pair's term of the row features, one hexadecimal digit each, the first lowest.
      y_terms: index of each pair's term of the column features.
    """

    width: int
    stride: int
    num_pairs: int
    x_terms: int
    y_terms: int

    @classmethod
    def of(cls, x: Array, pairs: Pairs) -> Self:
        """Return the GEMM of row features `x`."""
        x_terms, y_terms = zip(*pairs, strict=True)
        return cls(term_width(x, pairs), x.shape[1], len(pairs), _digits(x_terms), _digits(y_terms))


class Settings(NamedTuple):
    """Constants of a kernel.

    Attributes:
      gemm: GEMM of x and y.
      block_m: see `TritonConfig`, as `block_n`, `block_d` and `group_m`.
      ds_terms: number of bf16 terms of dS; 0 for sums and maxima.
      other: GEMM of the teacher's features.
      exclude: whether the positives are excluded.
      maxima: whether to reduce exponents to maxima instead of exponentials to sums.
    """

    gemm: Gemm
    block_m: int
    block_n: int
    block_d: int
    group_m: int
    ds_terms: int = 0
    other: Gemm | None = None
    exclude: bool = False
    maxima: bool = False


@dataclasses.dataclass(frozen=True)
class TritonKernels:
    """Common part of the `kernel_api.Kernels` for GPUs from Ampere to Hopper.

    Attributes:
      config: block sizes and launch parameters.
      compute_capability: 10 * major + minor of the GPU.
    """

    config: TritonConfig
    compute_capability: int

    @classmethod
    def for_capability(cls, capability: str) -> Self:
        """Create the kernels for a CUDA compute capability.

        Raises:
          ValueError: the GPU is not Ampere, Ada or Hopper.
        """
        number = int(capability.replace(".", ""))
        if not 80 <= number <= 90:
            raise ValueError(
                f"expected a GPU of compute capability 8.0 to 9.0, got {capability}; use another implementation or None"
            )
        return cls(CONFIGS[max(c for c in CONFIGS if c <= number)], number)

    @property
    def tile(self) -> tuple[int, int]:
        """Row and column multiples of every window.

        Both are equal, so that tiles on the diagonal are complete.
        """
        size = max(self.config.block_m, self.config.block_n)
        return size, size

    @property
    def depth(self) -> int:
        """Multiple to which the number of features is padded."""
        return self.config.block_d

    def settings(self, x: Array, pairs: Pairs, **options: Any) -> Settings:
        """Return the settings of a kernel for row features `x`; `options` are further fields of `Settings`."""
        c = self.config
        return Settings(Gemm.of(x, pairs), c.block_m, c.block_n, c.block_d, c.group_m, **options)

    def launch(
        self,
        kernel: Any,
        name: str,
        num_programs: int,
        shape: tuple[int, int],
        operands: dict[str, Array | None],
        results: dict[str, jax.ShapeDtypeStruct],
        settings: Settings,
        num_warps: int,
    ) -> dict[str, Array]:
        """Launch a kernel; operands and results have the names of its pointers."""
        c, gemms = self.config, [gemm for gemm in (settings.gemm, settings.other) if gemm is not None]
        for gemm in gemms:
            if shape[0] % c.block_m or shape[1] % c.block_n or gemm.width % c.block_d:
                raise ValueError(
                    f"expected rows, columns and features in multiples of {(c.block_m, c.block_n, c.block_d)}, "
                    f"got {(*shape, gemm.width)}; pad them"
                )
        features = sum(gemm.width * gemm.num_pairs for gemm in gemms)
        jax_triton, _ = load()
        out = jax_triton.triton_call(
            kernel=kernel,
            out_type=tuple(results.values()),
            grid=(num_programs,),
            name=name,
            num_warps=num_warps,
            num_stages=c.num_stages,
            compute_capability=self.compute_capability,
            backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
            cost_estimate={"flops": 2 * num_programs * c.block_m * c.block_n * features},
            **{f"{name}_ptr": a for name, a in operands.items()},
            SETTINGS=settings,
        )
        # jax-triton drops the varying mesh axes of its operands.
        varying = frozenset().union(
            *(jax.typeof(a).manual_axis_type.varying for a in operands.values() if a is not None)
        )
        return {name: as_varying(a, varying) for name, a in zip(results, out, strict=True)}

    def compute_tiles(
        self,
        kernel: Any,
        name: str,
        window: Window,
        operands: dict[str, Array | None],
        results: dict[str, jax.ShapeDtypeStruct],
        settings: Settings,
        num_warps: int,
    ) -> dict[str, Array]:
        """Launch a kernel on all tiles of a window, with the arguments and results of `launch`."""
        tiles_m, tiles_n = self.tiles(window)
        if self.config.block_m * settings.ds_terms * window.columns >= 1 << 31:
            raise ValueError(
                f"expected a window whose tiles of dS span less than 2^31 elements, got {window}; use fewer columns"
            )
        numbers = [jnp.asarray(n, jnp.int32) for n in (window.row, window.column, tiles_m, tiles_n)]
        operands, shape = operands | {"window": jnp.stack(numbers)}, (window.rows, window.columns)
        return self.launch(kernel, name, tiles_m * tiles_n, shape, operands, results, settings, num_warps)

    def tiles(self, window: Window) -> tuple[int, int]:
        """Return the numbers of row tiles and of column tiles of a window."""
        return window.rows // self.config.block_m, window.columns // self.config.block_n

    def positives(
        self, x: BFloat16[Array, "rows k"], y: BFloat16[Array, "rows k"], pairs: Pairs
    ) -> Float32[Array, "rows"]:
        """Implement `Kernels.positives`."""
        rows = x.shape[0]
        num_tiles = rows // min(self.config.block_m, self.config.block_n)
        out = {"s_ii": jax.ShapeDtypeStruct((rows,), jnp.float32)}
        operands, settings = {"x": x, "y": y}, self.settings(x, pairs)
        launch = functools.partial(self.launch, load()[1].diagonal_kernel, "pairwise_diagonal")
        return launch(num_tiles, (rows, rows), operands, out, settings, self.config.num_warps)["s_ii"]


def _digits(terms: Sequence[int]) -> int:
    """Pack the indices of terms into hexadecimal digits, the first one lowest."""
    return sum(term << 4 * index for index, term in enumerate(terms))


def kernels_of(loss: str) -> Any:
    """Import the module `triton_kernels` of a loss, given its folder, once Triton is known to work."""
    load()
    return importlib.import_module(f"infcl_jax.ops.pairwise.{loss}.triton_kernels")


@functools.cache
def load() -> tuple[Any, Any]:
    """Import jax_triton and `triton_kernels`.

    Raises:
      ImportError: a package is missing or cannot be imported, or its version silently computes nothing. The message
        is one line.
    """
    try:
        import triton
    except Exception as e:  # of any kind, such as an OSError of a shared library
        if _is_missing("triton", e):
            raise ImportError(f"the Triton kernels need jax-triton >= 0.4.1 and triton >= 3.7; {INSTALL}") from e
        raise ImportError(f"triton cannot be imported: {_one_line(e)}") from e
    version = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
    if version < (3, 7):
        raise ImportError(f"the Triton kernels need triton >= 3.7, got {triton.__version__}; {INSTALL}")
    try:
        import jax_triton

        _adapt_dce_rule()
        from infcl_jax.ops.pairwise import triton_kernels
    except Exception as e:  # of any kind, where a release of one package does not know the others'
        if _is_missing("jax_triton", e):
            raise ImportError(f"the Triton kernels need jax-triton >= 0.4.1; {INSTALL}") from e
        raise ImportError(
            f"jax-triton cannot be used with JAX {jax.__version__} and triton {triton.__version__}: {_one_line(e)}"
        ) from e
    return jax_triton, triton_kernels


def _is_missing(package: str, error: Exception) -> bool:
    """Return whether the package itself is missing, not a module that it imports."""
    return isinstance(error, ModuleNotFoundError) and error.name == package


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _adapt_dce_rule() -> None:
    """Give jax-triton's rule of dead code elimination the signature that JAX 0.12 calls.

    jax-triton 0.4.1 registers `rule(used_outs, eqn)`, the signature of JAX 0.11. JAX 0.12 calls it with `(used_outs,
    live_ins, eqn)`. Once a release of jax-triton registers a rule of three parameters, this function can go.
    """
    from jax.interpreters import partial_eval
    from jax_triton import triton_lib

    rules: dict[Any, Any] = partial_eval.dce_rules
    rule = rules[triton_lib.triton_kernel_call_p]
    if jax.__version_info__ >= (0, 12) and len(inspect.signature(rule).parameters) == 2:
        rules[triton_lib.triton_kernel_call_p] = lambda used_outs, live_ins, eqn: rule(used_outs, eqn)
