"""Cluster detection, and transfer of arrays to devices and back."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from oracle import mesh_of

from infcl_jax.runtime import distributed
from infcl_jax.runtime.distributed import data_mesh, replicate, shard_batch, to_host, training_mesh, union

EXPLICIT = {"COORDINATOR_ADDRESS": "host:1234", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}
TIMEOUTS = {"initialization_timeout": 120, "heartbeat_timeout_seconds": 30}
CLUSTER = {"coordinator_address": "host:1234", "num_processes": 4, "process_id": 3} | TIMEOUTS


@pytest.fixture
def met(monkeypatch):
    """Address, rank and number of processes of every rendezvous."""
    calls = []
    monkeypatch.setattr(distributed.rendezvous, "meet", lambda *arguments, **_: calls.append(arguments))
    return calls


@pytest.fixture
def joined(monkeypatch, met):
    """The arguments of every call of `jax.distributed.initialize`."""
    calls = []
    monkeypatch.setattr(distributed.jax_start, "set_variables", lambda **_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize(
    ("environ", "calls"),
    [
        ({}, []),
        (EXPLICIT, [CLUSTER]),
        (EXPLICIT | {"NUM_PROCESSES": "1", "PROCESS_ID": "0"}, []),
        ({"COORDINATOR_ADDRESS": "", "NUM_PROCESSES": "", "PROCESS_ID": ""}, []),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, [TIMEOUTS]),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, []),
        ({"SLURM_NTASKS": "2"}, []),  # an interactive allocation
        ({"OMPI_COMM_WORLD_SIZE": "2"}, [TIMEOUTS]),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, []),
        ({"SLURM_NTASKS": "2", "OMPI_COMM_WORLD_SIZE": "2"}, [TIMEOUTS]),  # mpirun in an allocation
        (EXPLICIT | {"SLURM_NTASKS": "9", "SLURM_STEP_ID": "0"}, None),
    ],
    ids=str,
)
def test_the_cluster_is_read_from_the_environment(joined, environ, calls):
    distributed.initialize(environ)
    assert joined == ([CLUSTER] if calls is None else calls)


def test_the_environment_of_the_process_is_the_default(joined, monkeypatch):
    for name, value in EXPLICIT.items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    assert [call["process_id"] for call in joined] == [3]


def test_a_process_joins_once(joined, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    distributed.initialize(EXPLICIT)
    assert joined == []


def test_processes_meet_before_they_join(joined, met, monkeypatch):
    slurm = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    for name, value in (slurm | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}).items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    distributed.initialize(EXPLICIT)
    assert [(address.text, *ranks) for address, *ranks in met] == [("n3:61441", 1, 2), ("host:1234", 3, 4)]
    assert "JAX_COORDINATOR_PORT" in str(met[0][0].in_use())


@pytest.mark.parametrize("address", ["host", "host:0", "host:abc", "::1:80"])
def test_a_wrong_address_is_an_error_before_anything_starts(joined, met, tmp_path, address):
    with pytest.raises(ValueError, match=r"^expected COORDINATOR_ADDRESS as HOST:PORT [^\n]*$"):
        distributed.initialize(EXPLICIT | {"COORDINATOR_ADDRESS": address}, log_dir=tmp_path / "logs")
    assert (met, joined, list(tmp_path.iterdir())) == ([], [], [])


@pytest.mark.parametrize("missing", list(EXPLICIT))
def test_missing_settings_are_named(joined, missing):
    environ = {name: value for name, value in EXPLICIT.items() if name != missing}
    with pytest.raises(ValueError, match=f"^expected all of [^\n]*; missing: {missing}$"):
        distributed.initialize(environ)
    assert joined == []


@pytest.mark.parametrize(
    ("count", "rank"), [("4", "4"), ("0", "0"), ("-2", "0"), ("two", "0"), ("2", "1.0"), ("2", "-1")]
)
def test_settings_that_are_no_ranks_are_refused(joined, count, rank):
    with pytest.raises(
        ValueError, match=f"^expected 0 <= PROCESS_ID < NUM_PROCESSES, got PROCESS_ID={rank}, [^\n]*{count}$"
    ):
        distributed.initialize(EXPLICIT | {"NUM_PROCESSES": count, "PROCESS_ID": rank})
    assert joined == []


def test_the_mesh_has_one_axis_over_all_devices():
    mesh = data_mesh()
    assert (mesh.axis_names, mesh.size, list(mesh.devices)) == (("data",), len(jax.devices()), jax.devices())


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


def test_a_single_process_leads():
    assert distributed.is_lead()


@pytest.mark.parametrize("values", [[[3, 1, 3]], [[5, 2**40, 1], [], [7, 5]], [[], []]])
def test_union_of_the_integers_of_all_processes(monkeypatch, values):
    processes, barrier, shared = len(values), threading.Barrier(len(values)), {}

    def process_allgather(array):
        shared[threading.get_ident()] = np.asarray(array)
        barrier.wait()
        stacked = np.stack(list(shared.values()))
        barrier.wait()
        return stacked

    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", process_allgather)
    with ThreadPoolExecutor(processes) as threads:
        unions = list(threads.map(union, values))
    assert unions == [sorted({value for row in values for value in row})] * processes


@pytest.mark.parametrize(
    ("others", "counts"),
    [
        ([], (1, 1)),
        ([("here", {0, 1})] * 3, (4, 4)),
        ([("here", {2, 3}), ("here", {0, 1})], (3, 2)),
        ([("there", {0, 1})] * 2, (1, 1)),
    ],
)
def test_processes_that_share_a_host_and_its_cores_are_counted(monkeypatch, others, counts):
    hashes = []

    def place(host, cores):
        monkeypatch.setattr("socket.gethostname", lambda: host)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores)

    def gather(own):
        hashes.append(own)
        return np.stack(hashes)

    monkeypatch.setattr(jax, "process_count", lambda: len(others) + 1)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gather)
    for other in others:
        place(*other)
        distributed.local_processes()
    place("here", {0, 1})
    assert distributed.local_processes() == counts


def device(process):
    return SimpleNamespace(process_index=process)


@pytest.mark.parametrize(
    ("layout", "processes", "hosts", "rows"),
    [
        (None, [0, 0, 1, 1], [7, 7], None),  # one host
        (None, [0, 0, 1, 1], [7, 8], [[0, 0], [1, 1]]),
        (None, [0, 1, 2, 3], [7, 8, 7, 8], [[0, 2], [1, 3]]),  # ranks dealt out to hosts in turn
        (None, [0, 1, 1], [7, 8], None),
        (None, [0, 1], [7, 8], None),  # a device each
        ("flat", [0, 0, 1, 1], [7, 8], None),
        ("hosts", [0, 0, 1, 1], [7, 7], [[0, 0], [1, 1]]),
        ("hosts", [0, 1], [7, 8], [[0], [1]]),
    ],
)
def test_rows_of_the_mesh_are_hosts(layout, processes, hosts, rows):
    found = distributed._mesh_rows(layout, list(map(device, processes)), hosts)
    assert (found and [[d.process_index for d in row] for row in found]) == rows


def test_hosts_of_different_sizes_have_no_two_levels():
    with pytest.raises(ValueError, match=r"same number of devices on each host with mesh 'hosts', got \[1, 2\]"):
        distributed._mesh_rows("hosts", list(map(device, [0, 1, 1])), [7, 8])


def test_the_mesh_of_one_process_is_flat_by_default():
    assert training_mesh() == data_mesh()
    assert training_mesh("hosts").devices.shape == (1, 8)
    with pytest.raises(ValueError, match="expected mesh to be one of"):
        training_mesh("ring")
