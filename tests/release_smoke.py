"""Smoke test of an installed wheel: version, loss, training, and use of the trained model.

    python -I tests/release_smoke.py VERSION CHECKOUT

Runs in an empty folder, outside the checkout.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import infcl_jax

SETTINGS = {
    "dataset": "digits",
    "model": "tiny",
    "model_overrides": "text.context_length=48",
    "batch_size": 32,
    "total_steps": 2,
    "optimizer": {"warmup_steps": 0},
    "compilation_cache": "off",
    "evaluation": {"zero_shot_dataset": "digits", "zero_shot_split": "zero_shot"},
}


def main(version: str, checkout: str) -> None:
    """Check the installed package.

    Args:
      version: expected version.
      checkout: folder of the repository, from which nothing may be imported.
    """
    assert infcl_jax.__version__ == version, infcl_jax.__version__
    assert not Path(infcl_jax.__file__).is_relative_to(checkout), infcl_jax.__file__
    features = jnp.eye(8)
    loss = jax.jit(lambda x: infcl_jax.clip_loss(x, x, 10.0))(features)
    np.testing.assert_allclose(loss, np.log1p(7 * np.exp(-10.0)), rtol=1e-4)
    results = infcl_jax.train(SETTINGS, "run")
    assert 0 <= results["zero_shot/top1"] <= 1, results
    encoder = infcl_jax.load("run")
    images = np.zeros((2, encoder.image_size, encoder.image_size, 3), np.uint8)
    np.testing.assert_allclose(encoder.zero_shot(images, ["zero", "one"]).sum(axis=1), 1, rtol=1e-5)


if __name__ == "__main__":
    main(*sys.argv[1:])
