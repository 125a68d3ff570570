"""The loss in a training loop of one's own, with Flax NNX, on all devices.

    python docs/examples/nnx_loop.py

Random pairs take the place of a dataset.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from infcl_jax import clip_loss
from infcl_jax.distributed import data_mesh, shard_batch


class Tower(nnx.Module):
    """Two layers; any module with normalized features `[rows, D]` takes their place."""

    def __init__(self, inputs: int, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(inputs, 128, rngs=rngs)
        self.projection = nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, rows):
        features = self.projection(nnx.gelu(self.hidden(rows)))
        return features / jnp.linalg.norm(features, axis=1, keepdims=True)


class TwoTowers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.image, self.text = Tower(64, rngs), Tower(16, rngs)
        self.log_scale = nnx.Param(jnp.log(jnp.float32(1 / 0.07)))


@nnx.jit(static_argnames="mesh")
def step(model, optimizer, image, text, *, mesh):
    """Update the model on one batch; return the mean loss over all of its pairs."""

    def loss_fn(model):
        return clip_loss(model.image(image), model.text(text), jnp.exp(model.log_scale[...]), mesh=mesh)

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 200, batch_size: int = 1024) -> None:
    """Train on pairs that share a latent vector."""
    mesh, rng, model = data_mesh(), np.random.default_rng(0), TwoTowers(nnx.Rngs(0))  # all devices of all hosts
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    matrices = rng.standard_normal((8, 64)), rng.standard_normal((8, 16))
    for number in range(steps):
        latent = rng.standard_normal((batch_size, 8))
        batch = shard_batch(mesh, [np.float32(latent @ matrix) for matrix in matrices])
        print(f"step {number + 1:3}  loss {step(model, optimizer, *batch, mesh=mesh):.4f}")


if __name__ == "__main__":
    main()
