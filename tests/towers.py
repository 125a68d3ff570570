"""Two small towers, a loss, and their gradients with and without gradient caching."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from infcl_jax import cached_value_and_grad, clip_loss

RNG = jax.random.key(7)


def mlp(params, chunk, rng):
    hidden = checkpoint_name(jnp.tanh(chunk @ params["in"]), "hidden")
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.8, hidden.shape), hidden / 0.8, jnp.zeros_like(hidden))
    features = hidden @ params["out"]
    return features / jnp.linalg.norm(features, axis=1, keepdims=True)


def image_tower(params, chunk, rng):
    return mlp(params["image"], chunk, rng)


def text_tower(params, chunk, rng):
    return mlp(params["text"], chunk, rng)


def random_variables(module, *inputs, scale=0.2):
    """Random values for every variable of a module, constants included; faster than compiling `init`."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))
    return jax.tree.map(lambda s: jnp.asarray(scale * rng.standard_normal(s.shape, np.float32)), shapes)


SEPARATE = {"image": image_tower, "text": text_tower}
TOWERS = {"separate": SEPARATE, "tied": {"image": image_tower, "text": image_tower}}


def mlp_params(width=32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(8, width), (width, 16)] * 2
    weights = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return {
        "image": dict(zip(("in", "out"), weights[:2], strict=True)),
        "text": dict(zip(("in", "out"), weights[2:], strict=True)),
        "log_scale": jnp.float32(2.0),
    }


def mlp_batch(rows):
    rng = np.random.default_rng(rows)
    return {name: rng.normal(size=(rows, 8)).astype(np.float32) for name in ("image", "text")}


def contrastive(params, features, mesh=None):
    image, text, scale = features["image"], features["text"], jnp.exp(params["log_scale"])
    if mesh is not None:
        return clip_loss(image, text, scale, mesh=mesh)
    logits = scale * (image @ text.T)
    both = jax.nn.logsumexp(logits, axis=0) + jax.nn.logsumexp(logits, axis=1)
    return (both / 2 - jnp.diagonal(logits)).mean()


def batch_sharding(devices):
    return None if devices == 1 else NamedSharding(oracle.mesh_of(devices), P("data"))


def direct(encoders, loss_fn, chunk_size, devices=1):
    """Jitted value and gradient without a cache; vmap stands in for the devices."""

    def total(params, batch, rng):
        features = dict(batch)
        for encoder, (name, encode) in enumerate(encoders.items()):
            blocks, size = batch[name].reshape(devices, -1, *batch[name].shape[1:]), chunk_size // devices
            starts, chunks = range(0, blocks.shape[1], size), []
            for number, start in enumerate(starts):
                shares = np.arange(devices) * len(starts) + number
                keys = rng
                if rng is not None:
                    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(rng, encoder), shares)
                chunk = blocks[:, start : start + size]
                chunks.append(jax.vmap(encode, (None, 0, None if rng is None else 0))(params, chunk, keys))
            features[name] = jnp.concatenate(chunks, axis=1).reshape(len(batch[name]), -1)
        return loss_fn(params, features)

    return jax.jit(jax.value_and_grad(total))


def cached(encoders, loss_fn, offload="none", **options):
    f = cached_value_and_grad(encoders, loss_fn, offload=offload, **options)
    return jax.jit(f) if offload == "none" else f


def place(params, batch, offload, sharding):
    """Parameters and batch where a trainer would have them."""
    if sharding is None:
        return params, batch
    params = jax.device_put(params, NamedSharding(sharding.mesh, P()))
    return params, jax.device_put(batch, sharding) if offload == "none" else batch


def assert_equal(got, expected, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(a, b) <= tolerance
