"""The undivided loss in float64, and what common mistakes make of it."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infcl_jax.grad_cache.chunks import Array, EncodeFn, chunk_rows

Groups = dict[str, list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Loss of a host batch, with its division among devices and chunks.

    `chunk_size` is over all devices. Without `rng`, encoders get None as their key.
    """

    loss: Callable[..., Array]
    encoders: Mapping[str, EncodeFn]
    params: Any
    batch: Mapping[str, Any]
    devices: int
    chunk_size: int
    rng: Array | None = None

    @property
    def rows(self) -> int:
        """Batch size b."""
        return int(np.shape(jax.tree.leaves(self.batch[next(iter(self.encoders))])[0])[0])

    @property
    def chunks(self) -> int:
        """Number of chunks k."""
        return -(-self.rows // self.chunk_size)

    def device_rows(self, device: int) -> np.ndarray:
        """Rows of the batch on one device."""
        size = self.rows // self.devices
        return np.arange(device * size, (device + 1) * size)

    def chunk_rows(self, number: int) -> np.ndarray:
        """Rows of the batch in one chunk."""
        return chunk_rows(number, self.rows, self.chunk_size, self.devices)

    def subset(self, rows: np.ndarray) -> "Problem":
        """Return the problem of some rows, undivided."""
        batch = jax.tree.map(lambda a: a[rows], dict(self.batch))
        return dataclasses.replace(self, batch=batch, devices=1, chunk_size=len(rows))

    def doubled(self) -> "Problem":
        """Return the problem of every row twice, which has twice the chunks."""
        return dataclasses.replace(self, batch=jax.tree.map(lambda a: np.concatenate([a, a]), dict(self.batch)))

    def value_and_grad(self, only: np.ndarray | None = None, *, narrow: bool = False) -> tuple[float, Any]:
        """Compute the undivided loss and its gradient, through the features of all rows or `only` of some.

        In float64, unless `narrow`, and except with a random key: `jax.random` draws other numbers under
        `jax.enable_x64`. Dtypes then follow the parameters, with products in full fp32.
        """
        widened = self.rng is None and not narrow
        with float64(widened or bool(jax.config.jax_enable_x64)), jax.default_matmul_precision("highest"):
            params, batch = (wide(tree) if widened else tree for tree in (self.params, dict(self.batch)))
            passing = None if only is None else np.isin(np.arange(self.rows), only)

            def value(params: Any) -> Array:
                features = {name: self._encode(name, params, batch[name]) for name in self.encoders}
                if passing is not None:
                    features = jax.tree.map(lambda f: _stop_rows(f, passing), features)
                # The loss is in float64 even if an encoder casts to a lower precision.
                return self.loss(params, batch | (wide(features) if widened else features))

            loss, grads = jax.jit(jax.value_and_grad(value))(params)
            return float(loss), jax.device_get(grads)

    def mixes_rows(self) -> bool:
        """Test whether an encoder's features of some rows depend on the other rows."""
        first = np.arange(self.rows)[: max(1, min(self.rows // self.devices, self.chunk_size // self.devices))]
        with float64():
            params = wide(self.params)
            for name, encode in self.encoders.items():
                entry = wide(self.batch[name])
                alone = jax.jit(encode)(params, jax.tree.map(lambda a: a[first], entry), self.rng)
                within = jax.tree.map(lambda f: f[first], jax.jit(encode)(params, entry, self.rng))
                pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(within), strict=True)
                if any(_distance(a, b) > 1e-4 for a, b in pairs):
                    return True
        return False

    def _encode(self, name: str, params: Any, entry: Any) -> Any:
        """Encode all rows, with the random keys of `cached_value_and_grad`."""
        encode = self.encoders[name]
        if self.rng is None:
            return encode(params, entry, None)
        key = jax.random.fold_in(self.rng, list(self.encoders).index(name))
        shards = []
        for device in range(self.devices):
            rows = self.device_rows(device)
            for chunk in range(self.chunks):
                shard = np.intersect1d(rows, self.chunk_rows(chunk))
                number = np.int32(device * self.chunks + chunk)
                shards.append(
                    encode(params, jax.tree.map(lambda a, s=shard: a[s], entry), jax.random.fold_in(key, number))
                )
        return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *shards)


@contextlib.contextmanager
def float64(enabled: bool = True) -> Iterator[None]:
    """Allow float64, and promotion of the 32-bit types for which a program was written."""
    with jax.enable_x64(enabled), jax.numpy_dtype_promotion("standard"):
        yield


def wide(tree: Any) -> Any:
    """Cast floating arrays to float64, inside `float64()`; a sharded array keeps its sharding."""

    def cast(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        return leaf.astype(jnp.float64) if isinstance(leaf, jax.Array) else np.asarray(leaf, np.float64)

    return jax.tree.map(cast, tree)


def accepted_options(loss: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the options that the signature of a loss names."""
    parameters = inspect.signature(loss).parameters
    every = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in options.items() if every or name in parameters}


def groups_of(tree: Any, leave_out: Collection[str] = ()) -> Groups:
    """Split parameters into float64 groups by their first keys or attributes, below a lone "params"."""
    if isinstance(tree, Mapping) and set(tree) == {"params"}:
        tree = tree["params"]
    groups: Groups = {}
    for path, leaf in jax.tree.leaves_with_path(jax.device_get(tree)):
        # Mappings and modules have names; a lone array or a sequence is one group.
        first = path[0] if path else None
        name = str(getattr(first, "key", getattr(first, "name", "params")))
        if name not in leave_out:
            groups.setdefault(name, []).append(np.asarray(leaf, np.float64))
    return groups


def _stop_rows(features: Array, passing: np.ndarray) -> Array:
    passing = passing.reshape(-1, *[1] * (features.ndim - 1))
    return jnp.where(passing, features, jax.lax.stop_gradient(features))


def _distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300))
