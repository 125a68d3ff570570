"""Device meshes, and transfer of arrays to devices and back."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from oracle import mesh_of

from infcl_jax.runtime.mesh import _mesh_rows, data_mesh, replicate, shard_batch, to_host, training_mesh


def tree(rows):
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (rows, 3, 2), dtype=np.uint8),
        "text": rng.integers(-5, 5, (rows,), dtype=np.int32),
        "mask": rng.random((rows, 1)) < 0.5,
        "half": rng.normal(size=(rows, 2)).astype(jnp.bfloat16),
    }


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_batch_is_shared_in_order_and_comes_back(devices):
    mesh, batch = mesh_of(devices), tree(16)
    arrays = shard_batch(mesh, batch)
    for name, array in arrays.items():
        assert array.shape == batch[name].shape
        shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
        parts = np.split(batch[name], devices)
        assert all(runs.equal_bits(shard.data, part) for shard, part in zip(shards, parts, strict=True))
    assert runs.equal_bits(to_host(arrays), batch)


@pytest.mark.parametrize("devices", [1, 8])
def test_replicas_are_whole_on_every_device_and_come_back(devices):
    values, key = tree(5) | {"scalar": np.float32(2.5)}, jax.random.key(3)
    arrays, copy = replicate(mesh_of(devices), (values, key))
    assert copy.dtype == key.dtype and len(copy.addressable_shards) == devices
    assert runs.equal_bits(jax.random.bits(copy), np.asarray(jax.random.bits(key)))
    for name, array in arrays.items():
        assert len(array.addressable_shards) == devices
        assert all(runs.equal_bits(shard.data, values[name]) for shard in array.addressable_shards)
    assert runs.equal_bits(to_host(arrays), jax.tree.map(np.asarray, values))


def test_rows_that_cannot_be_shared_evenly_are_refused():
    with pytest.raises(
        ValueError, match=r"^expected a batch that the 8 devices [^\n]* got 12 rows; choose a batch_size"
    ):
        shard_batch(mesh_of(8), tree(12))


def device(process):
    return SimpleNamespace(process_index=process)


@pytest.mark.parametrize(
    ("layout", "processes", "hosts", "rows"),
    [
        (None, [0, 0, 1, 1], ["a", "a"], None),  # one host
        (None, [0, 0, 1, 1], ["a", "b"], [[0, 0], [1, 1]]),
        (None, [0, 1, 2, 3], ["a", "b", "a", "b"], [[0, 2], [1, 3]]),  # ranks dealt out to hosts in turn
        (None, [0, 1, 1], ["a", "b"], None),
        (None, [0, 1], ["a", "b"], None),  # a device each
        ("flat", [0, 0, 1, 1], ["a", "b"], None),
        ("hosts", [0, 0, 1, 1], ["a", "a"], [[0, 0], [1, 1]]),
        ("hosts", [0, 1], ["a", "b"], [[0], [1]]),
    ],
)
def test_rows_of_the_mesh_are_hosts(layout, processes, hosts, rows):
    found = _mesh_rows(layout, list(map(device, processes)), hosts)
    assert (found and [[d.process_index for d in row] for row in found]) == rows


def test_hosts_of_different_sizes_have_no_two_levels():
    with pytest.raises(ValueError, match=r"same number of devices on each host with mesh 'hosts', got \[1, 2\]"):
        _mesh_rows("hosts", list(map(device, [0, 1, 1])), ["a", "b"])


def test_the_mesh_of_one_process_is_flat_by_default():
    assert training_mesh() == data_mesh()
    assert training_mesh("hosts").devices.shape == (1, 8)
    with pytest.raises(ValueError, match="expected mesh to be one of"):
        training_mesh("ring")
