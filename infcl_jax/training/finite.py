"""Check of the norms of the arrays of a train state."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def first_nonfinite_norm(tree: Any) -> str | None:
    """Return the first array whose norm is not finite, such as "params/visual/kernel".

    The fp32 norm is NaN or infinite if an entry is, or if an entry exceeds 1.8e19, whose square overflows. A model with
    such parameters has no finite loss.

    One compiled reduction over all arrays. All processes must call this function and get the same result.

    Args:
      tree: pytree of arrays on the devices; integer arrays are ignored.
    """
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
    if not leaves:
        return None
    sharding = getattr(leaves[0][1], "sharding", None)
    # Replicated, so that every process can read the flags.
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    finite = np.asarray(_reduction(replicated)([leaf for _, leaf in leaves]))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return next((name for name, ok in zip(names, finite, strict=True) if not ok), None)


@functools.cache
def _reduction(sharding: Sharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    """Compile the tests of all arrays into one program."""

    def finite_norms(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(jnp.square(a.astype(jnp.float32)).sum()) for a in arrays])

    return jax.jit(finite_norms, out_shardings=sharding)
