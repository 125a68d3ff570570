"""Compile attention and its gradients for an H100 that this machine does not have.

    python tests/assemble_attention.py 128 causal spans

See `cuda_plugin.environment` for the environment. With `MOSAIC_GPU_DUMP_PTXAS=1`, JAX prints the assembler's report.
"""

import functools
import sys

import jax
import jax.numpy as jnp
from cuda_plugin import H100
from gpus import ALONE
from jax.experimental import topologies

from infcl_jax.ops.attention.api import attend

device = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology="1x1x1").devices[0]
jax.config.update("jax_default_device", device)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def gradient(packed, cotangent, *spans, causal):
    run = functools.partial(attend, causal=causal, spans=spans or None, implementation="mosaic_gpu")
    return jax.vjp(run, packed)[1](cotangent)


positions, *masks = sys.argv[1:]
batch, heads = (1024, int(positions)), 8
spans = [array(*batch, dtype=jnp.int32)] * 2 if "spans" in masks else []
with jax.sharding.use_abstract_mesh(ALONE):
    compiled = jax.jit(functools.partial(gradient, causal="causal" in masks))
    traced = compiled.trace(array(*batch, 3 * heads, 64), array(*batch, heads, 64), *spans)
    traced.lower(lowering_platforms=("cuda",)).compile()
