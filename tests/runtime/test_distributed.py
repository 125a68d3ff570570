"""Cluster detection, the start of the processes, and the settings that JAX reads at its start."""

import os
import subprocess
import sys

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


SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def start(monkeypatch):
    """A function that sets the platform that JAX has started. At first there is none, and no variable is set."""
    for name in ("XLA_FLAGS", *SHARE_NAMES, CONNECTIONS):
        monkeypatch.setenv(name, "")  # restored in the end, also if the test sets or deletes it
        monkeypatch.delenv(name)

    def started(platform):
        monkeypatch.setattr(distributed, "_started_platform", lambda: platform)

    started(None)
    return started


def flags():
    return os.environ["XLA_FLAGS"].split()


@pytest.mark.parametrize("given", ["", "--xla_a=1", "--xla_gpu_collective_permute_mode=private"])
def test_flags_do_not_replace_those_given(start, monkeypatch, given):
    monkeypatch.setenv("XLA_FLAGS", given)
    for _ in range(2):
        distributed.set_variables()
    names = [flag.split("=")[0] for flag in flags()]
    assert flags()[: len(given.split())] == given.split()
    assert len(set(names)) == len(names)
    assert {f"--{name}" for name in distributed.XLA_FLAGS} <= set(names)


@pytest.mark.parametrize(("given", "share"), [({}, 0.9), *(({name: "0.5"}, 0.5) for name in SHARE_NAMES)])
def test_the_share_of_memory_does_not_replace_the_one_given(start, monkeypatch, given, share):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        distributed.set_variables()
    assert distributed.memory_share() == share
    # JAX refuses to be told twice.
    assert [float(os.environ[name]) for name in SHARE_NAMES if os.environ.get(name)] == [share]


GPU_FLAGS = [f"--{name}={value}" for name, value in distributed.XLA_FLAGS.items() if "_gpu_" in name]
CPU_FLAGS = [f"--{name}={value}" for name, value in distributed.XLA_FLAGS.items() if "_cpu_" in name]
SHARE = f"{SHARE_NAMES[0]}=0.9"


@pytest.mark.parametrize(
    ("platform", "gpu_decode", "given", "late"),
    [
        ("cpu", True, {}, CPU_FLAGS),
        ("gpu", False, {}, [*GPU_FLAGS, SHARE]),
        ("gpu", False, {"XLA_FLAGS": f"{GPU_FLAGS[0]}", SHARE_NAMES[1]: "0.5"}, GPU_FLAGS[1:]),
        ("gpu", True, {}, [*GPU_FLAGS, "--xla_gpu_enable_command_buffer=", SHARE, f"{CONNECTIONS}=32"]),
        ("gpu", True, {CONNECTIONS: "8"}, [*GPU_FLAGS, "--xla_gpu_enable_command_buffer=", SHARE]),
    ],
)
def test_settings_that_come_too_late_are_named_once(start, monkeypatch, platform, gpu_decode, given, late):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    start(platform)
    advice = f"initialize({'gpu_decode=True' if gpu_decode else ''})"
    with pytest.warns(UserWarning) as warned:
        distributed.set_variables(gpu_decode=gpu_decode)
    message = str(warned[0].message)
    assert message.startswith(f"JAX started before these settings, which have no effect now: {' '.join(late)}. Restart")
    assert advice in message
    distributed.set_variables(gpu_decode=gpu_decode)  # a warning here would be an error


def test_the_platform_of_this_process_has_started():
    jax.devices()
    assert distributed._started_platform() == "cpu"


def test_initialize_sets_the_variables_and_does_not_start_jax():
    code = (
        "import os, infcl_jax; infcl_jax.distributed.initialize(gpu_decode=True)\n"
        f"print(os.environ['XLA_FLAGS'], os.environ['{CONNECTIONS}'])\n"
        "import jax; jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", CONNECTIONS)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    printed = subprocess.check_output(command, env=environment, text=True).split()
    assert printed == [*GPU_FLAGS, *CPU_FLAGS, "--xla_gpu_enable_command_buffer=", "32", "3"]


@pytest.mark.parametrize(
    ("platforms", "reason"),
    [("gpuu", "'gpuu' is not in the list"), ("cuda", ""), ("cpu,gpuu", "'gpuu' is not in the list")],
)
def test_a_platform_without_devices_is_named(platforms, reason):
    code = "from infcl_jax.runtime import distributed; distributed.start_platforms()"
    environment = os.environ | {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        f"ValueError: expected JAX_PLATFORMS to name a platform of this machine, got '{platforms}': "
    )
    assert reason in line and line.endswith("; cpu is always available, and JAX chooses if the variable is unset")
