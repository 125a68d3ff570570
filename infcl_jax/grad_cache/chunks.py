"""How a batch is divided: into one block of rows per device, and every block into chunks.

Device d of n holds the consecutive rows `[d b/n, (d+1) b/n)` of a batch of b. Chunk i of size c is rows
`[i c/n, (i+1) c/n)` of every block, so that every device encodes a share of every chunk and no row changes its device.
The last chunk is smaller where c does not divide b.
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

from infcl_jax.ops.pairwise_lse.base import accumulation_dtype

Array = jax.Array
Encoder = Callable[[Any, Any, Array | None], Any]
# (parameters, features of the whole batch) -> (loss, auxiliary output)
LossFn = Callable[[Any, dict[str, Any]], tuple[Array, Any]]
# (number of the device, its parameters, its rows, what all devices share) -> its rows of the result
PerDevice = Callable[[Array | int, Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The chunks of one device's block.

    Attributes:
      rows: of the block.
      size: rows of a full chunk on this device.
    """

    rows: int
    size: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return math.ceil(self.rows / self.size)

    def span(self, number: int) -> slice:
        """The rows of a chunk within the block."""
        return slice(number * self.size, min(self.rows, (number + 1) * self.size))

    def runs(self, keep: int) -> Iterator[tuple[range, int, bool]]:
        """Consecutive chunks that are treated alike: their numbers, their size, whether their activations are kept."""
        full = self.rows // self.size
        kept = min(keep, full)
        yield range(kept), self.size, True
        yield range(kept, full), self.size, False
        yield range(full, self.count), self.rows % self.size, keep > full


def chunk_rows(number: int, rows: int, chunk_size: int, devices: int = 1) -> np.ndarray:
    """The rows of the batch that one chunk holds, in the order in which it holds them.

    Example:
      >>> chunk_rows(1, rows=12, chunk_size=4, devices=2)
      array([2, 3, 8, 9])

    Args:
      number: of the chunk, from 0.
      rows: b, of the whole batch.
      chunk_size: as given to `cached_value_and_grad`.
      devices: n, over which the batch is sharded.

    Returns:
      int `[chunk_size]`, fewer for a last chunk that is smaller.

    Raises:
      ValueError: the devices cannot share the batch or a chunk evenly, or there is no such chunk.
    """
    layout = make_layout("the batch", rows, chunk_size, devices)
    if not 0 <= number < layout.count:
        raise ValueError(f"expected number to be that of a chunk, 0 to {layout.count - 1}, got {number}")
    return np.arange(rows).reshape(devices, -1)[:, layout.span(number)].reshape(-1)


def make_layout(name: str, rows: int, chunk_size: int, devices: int) -> Layout:
    """The layout of each device's block.

    Raises:
      ValueError: there are no rows, or the devices cannot share the batch or a chunk evenly.
    """
    if rows < 1 or rows % devices:
        raise ValueError(f"expected rows of {name} that {devices} devices can share evenly, got {rows}")
    if chunk_size < 1 or chunk_size % devices:
        raise ValueError(f"expected a chunk_size of {name} that {devices} devices can share evenly, got {chunk_size}")
    return Layout(rows // devices, chunk_size // devices)


def leading_rows(name: str, entry: Any) -> int:
    """The length of the leading axis that all arrays of a batch entry share.

    Raises:
      ValueError: there is no array, one is a scalar, or they differ.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(entry)]
    if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"expected arrays with one common leading axis in batch entry {name!r}, got shapes {shapes}")
    return shapes[0][0]


def widen(tree: Any) -> Any:
    """The same numbers in the dtypes in which gradients are summed: at least fp32."""
    return jax.tree.map(lambda a: a.astype(accumulation_dtype(a.dtype)), tree)


@dataclasses.dataclass(frozen=True)
class Tower:
    """An encoder and how it is cached; see `cached_value_and_grad`.

    Attributes:
      name: of its batch entry and of its features.
      number: its position among the encoders.
      encode: `(params, chunk, rng) -> features`.
      chunk_size: rows encoded at once, over all devices.
      keep: number of chunks whose activations are kept.
      keep_names: of values that are kept of the other chunks.
      frozen: whether it is encoded once and has no gradient.
    """

    name: str
    number: int
    encode: Encoder
    chunk_size: int
    keep: int
    keep_names: tuple[str, ...]
    frozen: bool

    def features(self, params: Any, chunk: Any, rng: Array | None, number: Array | int) -> Any:
        """One device's features of its share of a chunk.

        Args:
          params: of the model.
          chunk: this device's rows.
          rng: of the step, or None.
          number: of this share among all shares of all devices, in the order of the batch's rows.

        Raises:
          ValueError: what the encoder returns is not floating or has not one row for each row of the chunk.
        """
        key = None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, self.number), number)
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
    """The devices that share a batch.

    Args:
      sharding: of the batch's leading axis; None for one device.

    Raises:
      ValueError: it is no `NamedSharding` of the leading axis alone.
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
        # Other axes of the mesh hold copies, or parts of the parameters.
        self.local_count = self.count * len(sharding.addressable_devices) // len(sharding.device_set)

    def copies(self, params: Any) -> Any:
        """The parameters once per device, `[n, ...]`, so that each has its own gradients; as they are for one device.

        The sum over devices, which is the transpose, is then one reduction for all chunks instead of one per chunk.
        """
        if self.sharding is None:
            return params
        copies = jax.tree.map(lambda p: jnp.broadcast_to(p[None], (self.count, *p.shape)), params)
        place = jax.sharding.reshard if self._explicit else lax.with_sharding_constraint
        return jax.tree.map(lambda a: place(a, self.sharding), copies)

    def sum(self, copies: Any) -> Any:
        """The sum of what `copies` has given each device; as it is for one device."""
        return copies if self.sharding is None else jax.tree.map(lambda a: a.sum(0), copies)

    def run(self, function: PerDevice, copies: Any, rows: Any, shared: Any) -> Any:
        """Calls `function(device, params, rows, shared)` on every device.

        Args:
          function: knows nothing of other devices.
          copies: of `copies`.
          rows: pytree of arrays `[b, ...]`.
          shared: pytree of arrays.

        Returns:
          Pytree of arrays `[b, ...]`, from one block of rows per device.
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
            check_vma=False,  # encoders need not know that they run inside shard_map
        )(copies, rows, shared)

    def put(self, tree: Any, span: slice = slice(None)) -> Any:
        """This process's rows of host arrays, or a span of each device's block of them, to the devices.

        They are neither waited for nor copied on the host.
        """
        if self.sharding is None:
            return jax.device_put(jax.tree.map(lambda a: a[span], tree))
        return jax.tree.map(lambda a: self._put(np.asarray(a), span), tree)

    def _put(self, array: np.ndarray, span: slice) -> Array:
        blocks = array.reshape(self.local_count, -1, *array.shape[1:])[:, span]
        shape = (self.count * blocks.shape[1], *array.shape[1:])
        indices = self.sharding.addressable_devices_indices_map(shape).values()
        starts = sorted({rows.start or 0 for rows, *_ in indices})
        return jax.make_array_from_callback(
            shape, self.sharding, lambda index: blocks[starts.index(index[0].start or 0)]
        )

    @property
    def _explicit(self) -> bool:
        return AxisType.Explicit in self.sharding.mesh.axis_types
