"""Mosaic GPU kernels of a lowered program, and their compilation in several threads."""

import functools
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

_TARGET = "mosaic_gpu_v2"  # target of the custom calls to these kernels


def compile_kernels(kernels: Iterable[Mapping[str, bytes | bool]]) -> list[Future[Any]]:
    """Compile Mosaic GPU kernels, several at the same time, each in a program of its own.

    XLA compiles a program's kernels one after another, after it has chosen the code of the other operations. Mosaic GPU
    keeps compiled kernels by their hash, so that no program of the process compiles them again.

    Args:
      kernels: attributes of each kernel, from `mosaic_kernels`.

    Returns:
      A future per kernel, which ends with its compilation.
    """
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.float32))  # without operands: never executed
    programs = [jax.jit(functools.partial(call, **attributes)).lower() for attributes in kernels]
    pool = ThreadPoolExecutor(thread_name_prefix="compile kernels")
    futures = [pool.submit(program.compile) for program in programs]
    pool.shutdown(wait=False)
    return futures


def mosaic_kernels(lowered: Any) -> list[dict[str, bytes | bool]]:
    """Return the attributes of a lowered program's Mosaic GPU kernels, each kernel once.

    Args:
      lowered: `jax.jit(function).lower(...)`.
    """
    from jaxlib.mlir import ir  # a private name: without it, a run compiles its kernels with the step

    kernels: dict[Any, dict[str, bytes | bool]] = {}  # by hash

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == _TARGET:
            config = {name.name: name.attr for name in op.attributes["mhlo.backend_config"]}
            attributes = {n: a.value_bytes if isinstance(a, ir.StringAttr) else a.value for n, a in config.items()}
            kernels[attributes["kernel_hash"]] = attributes
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return list(kernels.values())
