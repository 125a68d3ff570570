"""Environment variables that JAX reads when it starts."""

import os

import jax
import pytest

from infcl_jax import jax_start

SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def platform(monkeypatch):
    """Set the platform that JAX has started; None at first. Without the variables of this process."""
    for name in ("XLA_FLAGS", *SHARE_NAMES, CONNECTIONS):
        monkeypatch.setenv(name, "")  # restored in the end, also if the test sets or deletes it
        monkeypatch.delenv(name)

    def start(name):
        monkeypatch.setattr(jax_start, "_started_platform", lambda: name)

    start(None)
    return start


def flags():
    return os.environ["XLA_FLAGS"].split()


@pytest.mark.parametrize("given", ["", "--xla_a=1", "--xla_gpu_collective_permute_mode=private"])
def test_flags_do_not_replace_those_given(platform, monkeypatch, given):
    monkeypatch.setenv("XLA_FLAGS", given)
    for _ in range(2):
        jax_start.set_variables()
    names = [flag.split("=")[0] for flag in flags()]
    assert flags()[: len(given.split())] == given.split()
    assert len(set(names)) == len(names)
    assert {f"--{name}" for name in jax_start.XLA_FLAGS} <= set(names)


@pytest.mark.parametrize("given", ["", "--xla_gpu_enable_command_buffer=FUSION"])
@pytest.mark.parametrize("gpu_decode", [True, False])
def test_gpu_decoding_turns_cuda_graphs_off(platform, monkeypatch, gpu_decode, given):
    monkeypatch.setenv("XLA_FLAGS", given)
    jax_start.set_variables(gpu_decode=gpu_decode)
    set_flags = [flag for flag in flags() if "command_buffer" in flag]
    assert set_flags == ([given] if given else ["--xla_gpu_enable_command_buffer="] * gpu_decode)


@pytest.mark.parametrize(("gpu_decode", "before", "after"), [(True, None, "32"), (True, "8", "8"), (False, None, None)])
def test_gpu_decoding_needs_hardware_queues(platform, monkeypatch, gpu_decode, before, after):
    if before:
        monkeypatch.setenv(CONNECTIONS, before)
    jax_start.set_variables(gpu_decode=gpu_decode)
    assert os.environ.get(CONNECTIONS) == after


@pytest.mark.parametrize(("given", "share"), [({}, 0.9), *(({name: "0.5"}, 0.5) for name in SHARE_NAMES)])
def test_the_share_of_memory_does_not_replace_the_one_given(platform, monkeypatch, given, share):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        jax_start.set_variables()
    assert jax_start.memory_share() == share
    # JAX refuses to be told twice.
    assert [float(os.environ[name]) for name in SHARE_NAMES if os.environ.get(name)] == [share]


@pytest.mark.parametrize(
    ("started", "ignored"),
    [("gpu", "--xla_gpu_enable_triton_gemm=false"), ("gpu", "XLA_CLIENT_MEM_FRACTION=0.9"), ("cpu", "--xla_cpu_")],
)
def test_settings_that_come_too_late_are_named_once(platform, started, ignored):
    platform(started)
    with pytest.warns(UserWarning, match=f"^JAX has started without [^\n]*{ignored}[^\n]*Restart") as warned:
        jax_start.set_variables()
    assert f"--xla_{'cpu' if started == 'gpu' else 'gpu'}_" not in str(warned[0].message)
    jax_start.set_variables()  # a warning here would be an error


def test_the_platform_of_this_process_has_started():
    jax.devices()
    assert jax_start._started_platform() == "cpu"
