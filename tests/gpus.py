"""Described Hopper GPUs to lower for, and the interpreter of their kernels."""

import collections
import contextlib
import faulthandler
import math
import re
import sys

import jax
import jax.extend.core
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def described(cores=132, **axes):
    """A mesh of Hopper GPUs."""
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=cores)
    return AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), abstract_device=device)


ALONE = described()
TWO_SMS = described(cores=2)


def under(mesh):
    """The mesh in use, or none."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


DEADLOCK = 300  # seconds
FINDS_RACES = plgpu.InterpretGPUParams(detect_races=True)


@contextlib.contextmanager
def interpreted(capsys, mesh=TWO_SMS):
    """Run kernels on the CPU and without races; a deadlock ends the process."""
    faulthandler.dump_traceback_later(DEADLOCK, exit=True, file=sys.__stderr__)
    try:
        with plgpu.force_gpu_interpret_mode(FINDS_RACES), under(mesh):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert "RACE" not in capsys.readouterr().out


def lowered(function, *arrays, **options):
    """The program for CUDA, as text."""
    return function.trace(*arrays, **options).lower(lowering_platforms=("cuda",)).as_text()


def largest_array(text):
    """Number of elements of a program's largest array."""
    arrays = re.findall(r"tensor<([\dx]+)x(?:f32|bf16|i32|i1)>", text)
    return max(math.prod(map(int, a.split("x"))) for a in arrays)


def count_primitives(jaxpr):
    """Count the equations of each primitive in a jaxpr, including those inside kernels."""
    inner = (core for eqn in jaxpr.eqns for core in jax.extend.core.jaxprs_in_params(eqn.params))
    return sum(map(count_primitives, inner), collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns))


def count_kernels(text):
    """Count the different kernels of a program.

    JAX 0.12 merges equal calls, JAX 0.11 does not.
    """
    return len(set(re.findall(r'custom_call @mosaic_gpu.*?kernel_hash = "(.*?)", module', text)))
