"""Largest relative errors of packed against padded texts in float64, by tower; takes numbers of devices.

Towers compute LayerNorm, softmax and projections in `jnp.float32`, which is float64 here. The annotations that tests
check name float32, so this needs a process of its own.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64

import test_packed  # noqa: E402, after the change
from towers import random_variables  # noqa: E402

from infcl_jax.data.packing import Packing  # noqa: E402
from infcl_jax.models import transformer_config  # noqa: E402

transformer_config.check_choice = lambda *choice: None  # float64 is no dtype of users


def errors(name, devices):
    """Return the errors of features and gradients by lengths of texts."""
    model, mesh = test_packed.tower(name, dtype="float64", param_dtype="float64"), oracle.mesh_of(devices)
    variables = random_variables(model, test_packed.texts(test_packed.RAGGED), scale=0.3)
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"])
    weight, block = np.random.default_rng(2).standard_normal((test_packed.B, 6)), test_packed.B // devices

    @jax.jit
    def run(tokens):
        def weighted(params):
            features = model.apply({"params": params}, tokens)
            return jnp.sum(features * weight), features

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            (_, features), gradients = jax.value_and_grad(weighted, has_aux=True)(params)
        return features, gradients

    def error(lengths):
        tokens = test_packed.texts(lengths)
        packed = Packing(test_packed.ROW, rows=block, shard=block).pack(tokens, model.lengths(tokens), block)
        placed = jax.device_put((packed, tokens), NamedSharding(mesh, PartitionSpec("data")))
        got, want = (jax.tree.leaves(jax.device_get(run(texts))) for texts in placed)
        assert got[0].dtype == np.float64
        return max(oracle.relative_error(a, b) for a, b in zip(got, want, strict=True))

    return {texts: error(lengths) for texts, lengths in test_packed.LENGTHS.items()}


if __name__ == "__main__":
    print(json.dumps({f"{name}, {n}": errors(name, int(n)) for n in sys.argv[1:] for name in test_packed.TOWERS}))
