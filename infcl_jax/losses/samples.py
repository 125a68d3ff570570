"""What a global contrastive loss remembers of every sample of the dataset, sharded over the devices by sample."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infcl_jax.checks import is_known
from infcl_jax.losses.batch import Array, AxisName, axis_and_devices, over_mesh

# The arrays are as long as the next multiple, whatever the devices: a checkpoint fits any number that divides it.
LENGTH_MULTIPLE = 2**10 * 3 * 5 * 7


class SampleState(NamedTuple):
    """Column 0 belongs to a sample's image, column 1 to its text; sample k is row k. All fp32.

    Attributes:
      log_u: `[n, 2]` logarithm of the moving average of the pairs' mean exponentials; -inf for a sample not yet seen,
        +inf for padding rows.
      temperature: `[n, 2]` temperature of each sample, None for losses with one temperature for all.
      first_moment: `[n, 2]` of the temperature's gradient, None likewise.
      second_moment: `[n, 2]` of the temperature's gradient, None likewise.
    """

    log_u: Array
    temperature: Array | None = None
    first_moment: Array | None = None
    second_moment: Array | None = None


def create_samples(
    samples: int, *, temperature: float | None = None, axis_name: AxisName | None = None, mesh: Mesh | None = None
) -> SampleState:
    """The state of a dataset that has not been seen: 8 bytes per sample, 32 with temperatures of their own.

    Args:
      samples: of the dataset, indexed from 0.
      temperature: where every sample's own temperature starts; None for losses with one temperature for all.
      axis_name: axis (or axes) of the mesh over which the state is sharded, as the batch is; the first by default.
      mesh: its devices, each of which holds consecutive samples; None: one device.

    Raises:
      ValueError: too few or too many samples, a temperature that is not positive, an unknown axis, or a number of
        devices that does not divide `LENGTH_MULTIPLE`.
    """
    if not 1 <= samples < 2**31 - LENGTH_MULTIPLE:
        raise ValueError(f"expected 1 to 2^31 samples, which int32 can index, got {samples}")
    if temperature is not None and not temperature > 0:
        raise ValueError(f"expected temperature > 0, got {temperature}")
    sharding = None
    if mesh is not None:
        axis_name, devices = axis_and_devices(mesh, axis_name)
        if LENGTH_MULTIPLE % devices:
            raise ValueError(f"expected a number of devices that divides {LENGTH_MULTIPLE}, got {devices}")
        sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    shape = (-(-samples // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, 2)

    def create() -> SampleState:
        is_padding = lax.broadcasted_iota(jnp.int32, shape, 0) >= samples
        log_u = jnp.where(is_padding, jnp.float32(jnp.inf), jnp.float32(-jnp.inf))
        if temperature is None:
            return SampleState(log_u)
        return SampleState(log_u, jnp.full(shape, temperature, jnp.float32), *jnp.zeros((2, *shape), jnp.float32))

    return jax.jit(create, out_shardings=sharding)()


def check_index(index: Array, mask: Array | None, state: SampleState) -> None:
    """Checks that known (not traced) indices are samples of the dataset.

    The size of the dataset is known if the state is on one device and not traced. Otherwise it is rounded up to a
    multiple of `LENGTH_MULTIPLE`.

    Args:
      index: int `[b]`, sample of each row of the global batch.
      mask: bool `[b]`, False for rows whose index may be anything.
      state: of the whole dataset.

    Raises:
      ValueError: an index is out of range.
    """
    if not (is_known(index) and is_known(mask)):
        return
    rows = np.asarray(index)[... if mask is None else np.asarray(mask)]  # under jit, jax.numpy would trace even this
    if not rows.size:
        return
    low, high, samples = int(rows.min()), int(rows.max()), state.log_u.shape[0]
    if is_known(state.log_u) and _is_on_one_device(state.log_u):
        with jax.ensure_compile_time_eval():
            if high >= samples or jnp.isposinf(state.log_u[high, 0]):
                samples = int((~jnp.isposinf(state.log_u[:, 0])).sum())
    if low < 0 or high >= samples:
        raise ValueError(f"expected index in [0, {samples}), the samples of the state, got values {low} to {high}")


def _is_on_one_device(array: Array) -> bool:
    return not isinstance(array, jax.Array) or len(array.devices()) == 1


def read_samples(state: SampleState, index: Array, axis_name: AxisName | None) -> SampleState:
    """The rows of some samples, inside `shard_map`; what moves between devices is 12 bytes per row of the batch.

    Args:
      state: this device's part.
      index: int `[b/n]`, samples of this device's rows of the batch.
      axis_name: mesh axes of batch and state; None for one device.

    Returns:
      `[b/n, 2]` arrays; NaN where there is no such sample.
    """
    everyone = _gathered(index, axis_name)
    local, mine = _local(state, everyone, axis_name)
    length = state.log_u.shape[0] * (lax.axis_size(axis_name) if axis_name else 1)
    exists = ((everyone >= 0) & (everyone < length))[:, None]

    def read(array: Array) -> Array:
        rows = _rows(array, local, mine)
        rows = jnp.where(mine[:, None], rows, jnp.zeros_like(rows))  # of all devices one has it
        rows = jnp.where(exists, rows, jnp.full_like(rows, jnp.nan))
        return lax.psum_scatter(rows, axis_name, tiled=True) if axis_name else rows

    rows = jax.tree.map(read, state)
    is_padding = jnp.isposinf(rows.log_u)
    return jax.tree.map(lambda array: jnp.where(is_padding, jnp.full_like(array, jnp.nan), array), rows)


def write_samples(
    state: SampleState,
    index: Array,
    rows: SampleState,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
) -> SampleState:
    """The state with new rows for some samples, in place where the state is donated.

    Of several rows for one sample the last in the order of the batch counts.

    Args:
      state: of `create_samples`.
      index: int `[b]`, the sample of each row. Rows without such a sample are left out, and padding is never written.
      rows: `[b, 2]` arrays.
      axis_name: as in `clip_loss`.
      mesh: as in `clip_loss`.
    """
    return over_mesh(_write, None, (state, index, rows), None, axis_name=axis_name, mesh=mesh, sharded_result=True)


def _write(settings: None, axis_name: AxisName | None, sharded: Any, shared: None) -> SampleState:
    state, index, rows = sharded
    everyone = _gathered(index, axis_name)
    local, mine = _local(state, everyone, axis_name)
    size = state.log_u.shape[0]
    beyond = size + jnp.arange(len(everyone), dtype=jnp.int32)  # dropped, and no two alike
    is_sample = mine & ~jnp.isposinf(_rows(state.log_u, local, mine)[:, 0])
    place = jnp.where(is_sample & _is_last(everyone), local, beyond)
    return jax.tree.map(
        lambda array, new: array.at[place].set(
            _gathered(new.astype(array.dtype), axis_name), mode="drop", unique_indices=True
        ),
        state,
        rows,
    )


def _gathered(rows: Array, axis_name: AxisName | None) -> Array:
    return lax.all_gather(rows, axis_name, tiled=True) if axis_name else rows


def _local(state: SampleState, index: Array, axis_name: AxisName | None) -> tuple[Array, Array]:
    """Rows of this device's part, and which of them there are."""
    size = state.log_u.shape[0]
    local = index - lax.axis_index(axis_name) * size if axis_name else index
    return local, (local >= 0) & (local < size)


def _rows(array: Array, local: Array, mine: Array) -> Array:
    """Rows `local` of this device's part, the first row where they are not its own."""
    return array.at[jnp.where(mine, local, 0)].get(mode="promise_in_bounds")


def _is_last(index: Array) -> Array:
    """Whether no later entry is the same."""
    order = jnp.argsort(index, stable=True)
    sorted_index = index[order]
    last = jnp.concatenate([sorted_index[1:] != sorted_index[:-1], jnp.ones_like(index[:1], bool)])
    return jnp.zeros_like(last).at[order].set(last, unique_indices=True)
