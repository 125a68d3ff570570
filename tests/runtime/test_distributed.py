"""Cluster detection, and the start of the processes."""

import jax
import pytest

from infcl_jax.runtime import distributed

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
    monkeypatch.setattr(distributed, "set_variables", lambda **_: None)
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


def test_a_wrong_address_is_an_error_before_anything_starts(joined, met, tmp_path):
    with pytest.raises(ValueError, match=r"^expected COORDINATOR_ADDRESS as HOST:PORT [^\n]*$"):
        distributed.initialize(EXPLICIT | {"COORDINATOR_ADDRESS": "host:0"}, log_dir=tmp_path / "logs")
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
