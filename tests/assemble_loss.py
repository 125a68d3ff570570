"""Compile a loss and its gradients for an H100 that this machine does not have.

    python tests/assemble_loss.py clip 512 bfloat16

See `cuda_plugin.environment` for the environment. With `MOSAIC_GPU_DUMP_PTXAS=1`, JAX prints the assembler's report.
"""

import sys

import jax
import jax.numpy as jnp
from cuda_plugin import H100
from gpus import ALONE
from jax.experimental import topologies

from infcl_jax import clip_loss, distillation_loss, pairwise_lse, siglip_loss

device = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology="1x1x1").devices[0]
jax.config.update("jax_default_device", device)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def by_id(x, y, scale, ids, **options):
    return clip_loss(x, y, scale, image_ids=ids, text_ids=ids, **options)


def siglip(x, y, scale, ids, **options):
    return siglip_loss(x, y, scale, -10.0, **options)


def distillation(x, y, scale, ids, **options):
    return distillation_loss(x, y, scale, x, y, scale, **options)


def per_sample(x, y, scale, ids, **options):
    scales = jnp.broadcast_to(scale, x.shape[:1])
    return sum(a.sum() for a in pairwise_lse(x, y, scales, scales, **options))


def clip(x, y, scale, ids, **options):
    return clip_loss(x, y, scale, **options)


def guided(x, y, scale, ids, **options):
    return clip_loss(x, y, scale, guide=(x, y), **options)


loss = {f.__name__: f for f in (clip, by_id, per_sample, guided, siglip, distillation)}[sys.argv[1]]
features = array(2048, int(sys.argv[2]), dtype=sys.argv[3])
with jax.sharding.use_abstract_mesh(ALONE):
    gradients = jax.jit(jax.value_and_grad(lambda *args: loss(*args, implementation="mosaic_gpu"), (0, 1, 2)))
    traced = gradients.trace(features, features, array(), array(2048, dtype=jnp.int32))
    traced.lower(lowering_platforms=("cuda",)).compile()
