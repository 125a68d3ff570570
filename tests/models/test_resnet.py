"""The residual image tower: size, normalization, pooling and running statistics."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import runs

from infcl_jax.models import CLIPOutput, ResNetConfig, l2_normalize
from infcl_jax.models.resnet import AttentionPool, BatchNorm, ResNet
from infcl_jax.runtime.mesh import shard_batch
from infcl_jax.training import GradCacheConfig, create_state, make_loss, make_train_step

TINY = ResNetConfig(width=4, layers=(1, 2, 1, 1), heads=4, image_size=64)


def images(rows=4, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 64, 64, 3)).astype(np.float32)


@functools.cache
def variables():
    return jax.jit(ResNet(TINY, 8).init)(jax.random.key(0), images())


def test_a_residual_block_starts_as_its_shortcut_and_the_tower_shrinks_by_32():
    settings = {"capture_intermediates": True, "mutable": ["intermediates"]}
    _, state = jax.jit(lambda v, x: ResNet(TINY, 8).apply(v, x, **settings))(variables(), images())
    out = {name: part["__call__"][0] for name, part in state["intermediates"].items() if name.startswith("layer")}
    shapes = {name: value.shape[1:] for name, value in out.items()}
    assert shapes == {
        "layer1_0": (16, 16, 16),
        "layer2_0": (8, 8, 32),
        "layer2_1": (8, 8, 32),
        "layer3_0": (4, 4, 64),
        "layer4_0": (2, 2, 128),
    }
    np.testing.assert_array_equal(out["layer2_1"], out["layer2_0"])  # its last scale is zero, its input not negative


def test_batch_norm_normalizes_and_remembers():
    module, x = BatchNorm("float32"), images() * 3 + 1
    start = module.init(jax.random.key(0), x, train=False)
    out, changed = module.apply(start, x, train=True, mutable=["batch_stats"])
    np.testing.assert_allclose(out, (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(changed["batch_stats"]["mean"], 0.1 * x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(changed["batch_stats"]["var"], 0.9 + 0.1 * x.var((0, 1, 2), ddof=1), rtol=1e-5)
    np.testing.assert_allclose(module.apply(start, x, train=False), x / np.sqrt(1 + 1e-5), rtol=1e-5)
    np.testing.assert_array_equal(module.apply({"params": start["params"]}, x, train=True), out)


def pool_gradient(dtype):
    """The attention pool's mean square and its gradient over the parameters."""
    x = images()[:, :3, :3].repeat(2, axis=3)
    params = jax.jit(AttentionPool(2, 5, "float32", "float32").init)(jax.random.key(1), x)["params"]
    loss = lambda p: (AttentionPool(2, 5, dtype, "float32").apply({"params": p}, x) ** 2).mean()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(params)


@functools.cache
def pool_gradient_in_float64():
    with jax.enable_x64(True):
        return jax.device_get(pool_gradient("float64"))


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 1e-3), ("bfloat16", 1e-2), ("float32", 1e-6)])
def test_attention_pool_compiles_in_every_dtype(dtype, atol):
    close = functools.partial(np.testing.assert_allclose, atol=atol)
    jax.tree.map(close, pool_gradient(dtype), pool_gradient_in_float64())


def test_attention_pool_equals_numpy():
    module, x = AttentionPool(2, 5, "float32", "float32"), images()[:, :3, :3].repeat(2, axis=3)
    params = jax.tree.map(np.asarray, module.init(jax.random.key(1), x)["params"])
    tokens = np.concatenate([x.mean((1, 2))[:, None], x.reshape(4, 9, 6)], 1) + params["positional_embedding"]
    q, k, v = (tokens @ params[f"{name}_proj"]["kernel"] + params[f"{name}_proj"]["bias"] for name in "qkv")
    heads = []
    for half in (slice(0, 3), slice(3, 6)):
        logits = np.einsum("bd,bnd->bn", q[:, 0, half], k[:, :, half]) / np.sqrt(3)
        weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        heads.append(np.einsum("bn,bnd->bd", weights, v[:, :, half]))
    expected = np.concatenate(heads, 1) @ params["c_proj"]["kernel"] + params["c_proj"]["bias"]
    np.testing.assert_allclose(module.apply({"params": params}, x), expected, rtol=1e-5, atol=1e-6)


class Encoder(nn.Module):
    """The least dual encoder with batch normalization; it compiles in no time."""

    def setup(self):
        self.norm, self.visual, self.text = BatchNorm("float32"), nn.Dense(8), nn.Embed(259, 8)

    def __call__(self, image, text, *, train=False):
        return CLIPOutput(self.encode_image(image, train=train), self.encode_text(text), *self.logit_scale_and_bias())

    def encode_image(self, image, *, train=False):
        pixels = self.norm(image.astype(jnp.float32), train=train)
        return l2_normalize(self.visual(pixels.reshape(len(image), -1)), "float32")

    def encode_text(self, text, *, train=False):
        return l2_normalize(self.text(text).mean(axis=1), "float32")

    @nn.compact
    def logit_scale_and_bias(self):
        return jnp.exp(self.param("logit_scale", nn.initializers.constant(2.7), (), jnp.float32)), None


def step(devices, **cache):
    """Loss, parameters and statistics after a step."""
    mesh = oracle.mesh_of(devices)
    state = create_state(Encoder(), optax.sgd(1e-2), runs.SIDE, runs.CONTEXT, 0, mesh)
    take = make_train_step(make_loss("clip", mesh), 0, GradCacheConfig(**cache), mesh)
    batch = runs.batch(16)
    state, metrics = take(state, batch if cache.get("offload") == "host" else shard_batch(mesh, batch))
    return jax.device_get((metrics["loss"], state.params, state.batch_stats))


def moved(images):
    """The statistics that start at 0 and 1 after a batch of images."""
    images = images.astype(np.float32)
    axes = (0, 1, 2)
    return {"norm": {"mean": 0.1 * images.mean(axes), "var": 0.9 + 0.1 * images.var(axes, ddof=1)}}


def assert_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, other)


def test_training_normalizes_by_the_global_batch():
    one = step(1)
    assert_close(step(4), one)
    assert_close(one[2], moved(runs.batch(16)["image"]))


def test_with_gradient_caching_the_statistics_are_those_of_the_first_chunk():
    device = step(1, chunk_size=8)
    assert_close(step(1, chunk_size=8, offload="host"), device)
    assert_close(device[2], moved(runs.batch(16)["image"][:8]))
    assert abs(device[0] - step(1)[0]) > 1e-4  # statistics per chunk are another function


@pytest.mark.parametrize(
    ("field", "value"),
    [("width", 0), ("width", 7), ("layers", (1, 2, 3)), ("layers", (1, 2, 3, 0)), ("heads", 5), ("image_size", 48)],
)
def test_a_shape_that_cannot_be_is_named(field, value):
    with pytest.raises(ValueError, match=rf"vision\.{field if field != 'heads' else '(width|heads)'}"):
        ResNetConfig(**{field: value})
