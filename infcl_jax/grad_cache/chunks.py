"""Layout of a batch: one block of rows per device, split into chunks.

Device d of n holds the block of rows `[d b/n, (d+1) b/n)` of a batch of size b. A chunk of size c consists of one shard
of c/n rows per device: chunk i has rows `[i c/n, (i+1) c/n)` of every block. Rows therefore never move between devices.
The last chunk is smaller if c does not divide b.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Float, Int, PyTree

from infcl_jax.ops.pairwise.base import accumulation_dtype

Array = jax.Array
EncodeFn = Callable[[Any, Any, Array | None], PyTree[Float[Array, "chunk ..."]]]
# (parameters, features of the whole batch) -> (loss, auxiliary output)
LossFn = Callable[[Any, dict[str, Any]], tuple[Float[Array, ""], Any]]
# (device number, its parameters, its rows, replicated arrays) -> its rows of the result
PerDevice = Callable[[Array | int, Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Chunks of one device's block of `rows`, whose shard of a full chunk has `size` rows."""

    rows: int
    size: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return math.ceil(self.rows / self.size)

    def chunk_slice(self, number: int) -> slice:
        """Rows of the block in chunk `number`."""
        return slice(number * self.size, min(self.rows, (number + 1) * self.size))

    def runs(self, keep: int) -> Iterator[tuple[range, int, bool]]:
        """Yield runs of equal chunks: chunk numbers, rows per shard, whether activations are stored."""
        full = self.rows // self.size
        stored = min(keep, full)
        yield range(stored), self.size, True
        yield range(stored, full), self.size, False
        yield range(full, self.count), self.rows % self.size, keep > full


def chunk_rows(number: int, rows: int, chunk_size: int, devices: int = 1) -> Int[np.ndarray, "chunk"]:
    """Indices of one chunk's rows in the batch, in the chunk's order.

    Examples:
      >>> chunk_rows(1, rows=12, chunk_size=4, devices=2)
      array([2, 3, 8, 9])

    Args:
      number: chunk number, from 0.
      rows: global batch size b.
      chunk_size: rows of a chunk over all devices, as in `cached_value_and_grad`.
      devices: number of devices n over which the batch is sharded.

    Returns:
      int `[chunk_size]`; shorter for a smaller last chunk.

    Raises:
      ValueError: the batch or chunk size is not divisible by the device count, or `number` is out of range.
    """
    layout = make_layout("the batch", rows, chunk_size, devices)
    if not 0 <= number < layout.count:
        raise ValueError(f"expected number to be a chunk number, 0 to {layout.count - 1}, got {number}")
    return np.arange(rows).reshape(devices, -1)[:, layout.chunk_slice(number)].reshape(-1)


def make_layout(name: str, rows: int, chunk_size: int, devices: int) -> Layout:
    """Lay out the chunks of each device's block.

    Raises:
      ValueError: there are no rows, or the batch or chunk size is not divisible by the device count.
    """
    if rows < 1 or rows % devices:
        raise ValueError(f"expected rows of {name} that {devices} devices can share evenly, got {rows}")
    if chunk_size < 1 or chunk_size % devices:
        raise ValueError(f"expected a chunk_size of {name} that {devices} devices can share evenly, got {chunk_size}")
    return Layout(rows // devices, chunk_size // devices)


def leading_rows(name: str, entry: Any) -> int:
    """Common length of the leading axes of a batch entry.

    Raises:
      ValueError: the entry has no arrays, one is a scalar, or their leading axes differ.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(entry)]
    if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"expected arrays with one common leading axis in batch entry {name!r}, got shapes {shapes}")
    return shapes[0][0]


def join_parameters(params: Any, frozen_params: Any) -> Any:
    """Return the first argument of encoders and loss."""
    return params if frozen_params is None else (params, frozen_params)


def widen(tree: Any) -> Any:
    """Cast arrays to their accumulation dtype, at least fp32."""
    return jax.tree.map(lambda a: a.astype(accumulation_dtype(a.dtype)), tree)


@dataclasses.dataclass(frozen=True)
class CachedEncoder:
    """An encoder and its caching settings, see `cached_value_and_grad`."""

    name: str  # of the batch entry and of the features
    index: int  # folded into the PRNG keys
    encode: EncodeFn
    chunk_size: int
    keep: int
    keep_names: tuple[str, ...]
    frozen: bool

    def checkpoint(self, encode: Callable[..., Any], *names: str, **options: Any) -> Callable[..., Any]:
        """Rematerialize `encode` in its backward pass, except for checkpointed values of `names` and `keep_names`."""
        policy = jax.checkpoint_policies.save_only_these_names(*names, *self.keep_names)
        return jax.checkpoint(encode, policy=policy, **options)

    def features(self, params: Any, chunk: Any, rng: Array | None, shard: Array | int) -> Any:
        """Encode one device's shard of a chunk.

        `shard` is its index in the order of the batch's rows, over all devices and chunks; `rng` is the step's key.

        Raises:
          ValueError: the features are not floating, or their number of rows differs from the chunk's.
        """
        key = None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, self.index), shard)
        features = self.encode(params, chunk, key)
        rows = leading_rows(self.name, chunk)
        for leaf in jax.tree.leaves(features):
            if leaf.shape[:1] != (rows,) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"expected encoder {self.name!r} to return floating features with {rows} rows for {rows} rows, "
                    f"got {leaf.dtype}{list(leaf.shape)}"
                )
        return features


class Devices:
    """Devices over which a batch is sharded, one block of rows each; one device without `sharding`.

    Attributes:
      sharding: sharding of the batch's leading axis.
      count: number of blocks n.
      local_count: number of blocks of this process.

    Raises:
      ValueError: `sharding` is not a `NamedSharding` of the leading axis alone.
    """

    def __init__(self, sharding: NamedSharding | None) -> None:
        self.sharding, self.count, self.local_count = sharding, 1, 1
        if sharding is None:
            return
        if not isinstance(sharding, NamedSharding) or len(sharding.spec) != 1 or sharding.spec[0] is None:
            raise ValueError(
                "expected sharding to be a NamedSharding of the leading axis alone, NamedSharding(mesh, P(axes)), "
                f"got {sharding}"
            )
        axes = sharding.spec[0]
        self.axes: tuple[str, ...] = (axes,) if isinstance(axes, str) else tuple(axes)
        self.count = math.prod(sharding.mesh.shape[axis] for axis in self.axes)
        # Blocks are replicated along the other mesh axes, over which the parameters may be sharded.
        self.local_count = self.count * len(sharding.addressable_devices) // len(sharding.device_set)

    def copies(self, params: Any) -> Any:
        """Broadcast the parameters to one copy per device, `[n, ...]`.

        Each device then accumulates its own gradients. The transpose of the broadcast is a single reduction per step
        instead of one per chunk. On one device it is a no-op.
        """
        if self.sharding is None:
            return params
        copies = jax.tree.map(lambda p: jnp.broadcast_to(p[None], (self.count, *p.shape)), params)
        explicit = AxisType.Explicit in self.sharding.mesh.axis_types
        constrain = jax.sharding.reshard if explicit else lax.with_sharding_constraint
        return jax.tree.map(lambda a: constrain(a, self.sharding), copies)

    def sum(self, copies: Any) -> Any:
        """Sum per-device arrays `[n, ...]` over devices; a no-op on one device."""
        return copies if self.sharding is None else jax.tree.map(lambda a: a.sum(0), copies)

    def run(self, function: PerDevice, copies: Any, rows: Any, shared: Any) -> Any:
        """Call `function(device, params, rows, shared)` on every device, without collectives.

        The results, like `rows`, are pytrees of arrays `[b, ...]` with one block per device. `copies` are per-device
        parameters from `copies`, and `shared` arrays are replicated.
        """
        if self.sharding is None:
            return function(0, copies, rows, shared)

        def body(copies: Any, rows: Any, shared: Any) -> Any:
            params = jax.tree.map(lambda a: a[0], copies)
            return function(lax.axis_index(self.axes), params, rows, shared)

        spec = PartitionSpec(self.axes)
        return jax.shard_map(
            body,
            mesh=self.sharding.mesh,
            in_specs=(spec, spec, PartitionSpec()),
            out_specs=spec,
            axis_names=set(self.axes),
            check_vma=False,  # encoders need no varying-axis annotations
        )(copies, rows, shared)

    def put(self, tree: Any, block_slice: slice = slice(None)) -> Any:
        """Transfer this process's rows of host arrays to the devices, or a slice of each device's block.

        The transfer is asynchronous and makes no copy in host memory.
        """
        if self.sharding is None:
            return jax.device_put(jax.tree.map(lambda a: a[block_slice], tree))
        return jax.tree.map(lambda a: self._put(np.asarray(a), block_slice), tree)

    def _put(self, array: np.ndarray, block_slice: slice) -> Array:
        blocks = array.reshape(self.local_count, -1, *array.shape[1:])[:, block_slice]
        shape = (self.count * blocks.shape[1], *array.shape[1:])
        indices = self.sharding.addressable_devices_indices_map(shape).values()
        starts = sorted({rows.start or 0 for rows, *_ in indices})  # first row of each of this process's blocks
        return jax.make_array_from_callback(
            shape, self.sharding, lambda index: blocks[starts.index(index[0].start or 0)]
        )
