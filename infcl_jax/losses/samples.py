"""Per-sample state of the global contrastive losses, sharded over the devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float32, Integer

from infcl_jax.losses.batch import Array, AxisName, axis_and_devices, over_mesh
from infcl_jax.ops.common.checks import is_concrete

# Rows of a state array are a multiple of this number, on any mesh. A checkpoint therefore loads on any device count
# that divides it.
LENGTH_MULTIPLE = 2**10 * 3 * 5 * 7


class SampleState(NamedTuple):
    """Per-sample estimators u and temperatures tau, as fp32 arrays `[n, 2]`.

    Row k holds sample k. Column 0 belongs to its image, column 1 to its text. The temperature and its moments are None
    for losses with a single temperature.

    Examples:
      >>> state = create_samples(1000)
      >>> state.temperature is None  # the loss has a single temperature
      True

    Attributes:
      log_u: logarithm of u, the moving average of the mean exponential over the negatives; -inf for an unseen sample,
        +inf for padding rows.
      temperature: temperature of each sample.
      first_moment: Adam's first moment of the temperature gradient.
      second_moment: Adam's second moment of the temperature gradient.
    """

    log_u: Float32[Array, "n 2"]
    temperature: Float32[Array, "n 2"] | None = None
    first_moment: Float32[Array, "n 2"] | None = None
    second_moment: Float32[Array, "n 2"] | None = None


def create_samples(
    samples: int, *, temperature: float | None = None, axis_name: AxisName | None = None, mesh: Mesh | None = None
) -> SampleState:
    """Create the sample state of an unseen dataset.

    It takes 8 bytes per sample, or 32 with per-sample temperatures.

    Examples:
      >>> state = create_samples(1000, temperature=0.07)
      >>> float(state.log_u[0, 0]), round(float(state.temperature[0, 0]), 2)
      (-inf, 0.07)

    Args:
      samples: number of samples in the dataset, indexed from 0.
      temperature: initial per-sample temperature; None for losses with a single temperature.
      axis_name: mesh axis (or axes) over which batch and state are sharded; the first by default.
      mesh: mesh whose devices each hold consecutive samples; None for one device.

    Raises:
      ValueError: too few or too many samples, a temperature that is not positive, an unknown axis, or a device count
        that does not divide `LENGTH_MULTIPLE`.
    """
    if not 1 <= samples < 2**31 - LENGTH_MULTIPLE:
        most = 2**31 - LENGTH_MULTIPLE - 1
        raise ValueError(f"expected 1 to {most} samples, so that int32 indexes the padded state, got {samples}")
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


def check_index(index: Integer[Array, "b"], mask: Bool[Array, "b"] | None, state: SampleState) -> None:
    """Check that concrete (not traced) indices of unmasked rows are samples of the dataset.

    The bound is the number of samples if the state is concrete and on one device. Otherwise it is the padded size, a
    multiple of `LENGTH_MULTIPLE`.
    """
    if not (is_concrete(index) and is_concrete(mask)):
        return
    values = np.asarray(index)  # NumPy, because jax.numpy is traced under jit
    values = values if mask is None else values[np.asarray(mask)]
    if not values.size:
        return
    low, high, samples = int(values.min()), int(values.max()), state.log_u.shape[0]
    if is_concrete(state.log_u) and _is_on_one_device(state.log_u):
        with jax.ensure_compile_time_eval():
            if high >= samples or jnp.isposinf(state.log_u[high, 0]):
                samples = int((~jnp.isposinf(state.log_u[:, 0])).sum())
    if low < 0 or high >= samples:
        raise ValueError(f"expected index in [0, {samples}), the samples of the state, got values {low} to {high}")


def _is_on_one_device(array: Array) -> bool:
    return not isinstance(array, jax.Array) or len(array.devices()) == 1


def read_samples(state: SampleState, index: Integer[Array, "b"], axis_name: AxisName | None) -> SampleState:
    """Read the state rows of the local batch, inside `shard_map`; NaN where the index is not a sample.

    Communication per row of the global batch is 4 bytes for the index and 8 bytes per array of the state.
    """
    global_index = _gather(index, axis_name)
    local_index, is_local = _local_index(state, global_index, axis_name)
    length = state.log_u.shape[0] * (lax.axis_size(axis_name) if axis_name else 1)
    exists = ((global_index >= 0) & (global_index < length))[:, None]

    def read(array: Array) -> Array:
        rows = _take_rows(array, local_index, is_local)
        rows = jnp.where(is_local[:, None], rows, jnp.zeros_like(rows))  # one device has the row, the others add zeros
        rows = jnp.where(exists, rows, jnp.full_like(rows, jnp.nan))
        return lax.psum_scatter(rows, axis_name, tiled=True) if axis_name else rows

    rows = jax.tree.map(read, state)
    is_padding = jnp.isposinf(rows.log_u)
    return jax.tree.map(lambda array: jnp.where(is_padding, jnp.full_like(array, jnp.nan), array), rows)


def write_samples(
    state: SampleState,
    index: Integer[Array, "b"],
    rows: SampleState,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
) -> SampleState:
    """Write rows into the sample state, in place if the state is donated.

    If the batch contains a sample more than once, the last row wins.

    Examples:
      >>> rows = SampleState(log_u=jnp.zeros((2, 2)))
      >>> state = write_samples(create_samples(5), jnp.array([3, 1]), rows)
      >>> state.log_u[:5, 0].tolist()
      [-inf, 0.0, -inf, 0.0, -inf]

    Args:
      state: sample state from `create_samples`.
      index: int `[b]`, sample of each row. Rows whose index is out of range or a padding row of the state are dropped.
      rows: new state rows, `[b, 2]` arrays.
      axis_name: mesh axis (or axes) of the batch, see `clip_loss`.
      mesh: mesh over which batch and state are sharded, see `clip_loss`.
    """
    return over_mesh(_write, None, (state, index, rows), None, axis_name=axis_name, mesh=mesh, sharded_result=True)


def _write(settings: None, axis_name: AxisName | None, sharded: Any, shared: None) -> SampleState:
    state, index, rows = sharded
    global_index = _gather(index, axis_name)
    local_index, is_local = _local_index(state, global_index, axis_name)
    size = state.log_u.shape[0]
    out_of_bounds = size + jnp.arange(len(global_index), dtype=jnp.int32)  # distinct, as unique_indices requires
    is_sample = is_local & ~jnp.isposinf(_take_rows(state.log_u, local_index, is_local)[:, 0])
    target = jnp.where(is_sample & _is_last(global_index), local_index, out_of_bounds)
    return jax.tree.map(
        lambda array, new: array.at[target].set(
            _gather(new.astype(array.dtype), axis_name), mode="drop", unique_indices=True
        ),
        state,
        rows,
    )


def _gather(rows: Array, axis_name: AxisName | None) -> Array:
    return lax.all_gather(rows, axis_name, tiled=True) if axis_name else rows


def _local_index(state: SampleState, index: Array, axis_name: AxisName | None) -> tuple[Array, Array]:
    """Return indices into this device's shard, and whether they are in the shard."""
    size = state.log_u.shape[0]
    local_index = index - lax.axis_index(axis_name) * size if axis_name else index
    return local_index, (local_index >= 0) & (local_index < size)


def _take_rows(array: Array, local_index: Array, is_local: Array) -> Array:
    """Take rows of this device's shard; row 0 for indices outside."""
    return array.at[jnp.where(is_local, local_index, 0)].get(mode="promise_in_bounds")


def _is_last(index: Array) -> Array:
    """Return a mask of the last occurrence of each index."""
    order = jnp.argsort(index, stable=True)
    sorted_index = index[order]
    last = jnp.concatenate([sorted_index[1:] != sorted_index[:-1], jnp.ones_like(index[:1], bool)])
    return jnp.zeros_like(last).at[order].set(last, unique_indices=True)
