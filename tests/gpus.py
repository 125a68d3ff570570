"""Described Hopper GPUs to lower for, and the interpreter of their kernels."""

import collections
import contextlib
import re

import jax
import jax.extend.core
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def described(cores=132, **axes):
    """A mesh of Hopper GPUs."""
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=cores)
    return AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), abstract_device=device)


ALONE = described()


def under(mesh):
    """The mesh in use, or none."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


@contextlib.contextmanager
def interpreted(capsys):
    """Kernels run on the CPU, on two multiprocessors, and without races."""
    races = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(races), under(described(cores=2)):
        yield
    assert "RACE" not in capsys.readouterr().out


def lowered(function, *arrays):
    """The program for CUDA, as text."""
    return function.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def count_primitives(jaxpr):
    """Count the equations of each primitive in a jaxpr, including those inside kernels."""
    inner = (core for eqn in jaxpr.eqns for core in jax.extend.core.jaxprs_in_params(eqn.params))
    return sum(map(count_primitives, inner), collections.Counter(eqn.primitive.name for eqn in jaxpr.eqns))


def count_kernels(text):
    """Count the different kernels of a program.

    JAX 0.12 merges equal calls, JAX 0.11 does not.
    """
    return len(set(re.findall(r'custom_call @mosaic_gpu.*?kernel_hash = "(.*?)", module', text)))
