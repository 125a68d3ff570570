"""The command `experiments.plan`: its table, its advice and its one-line errors."""

import re

import pytest
import runs

PLAN = "experiments.plan"
QUICKSTART = "--config=configs/quickstart.py"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--device=H200", "--devices=8", "--config.batch_size=4096"),
            r"8 device.*batch_size 4096, no gradient caching, implementation mosaic_gpu\n(.*\n)*"
            r"fits; recommended: no change\nlargest batch: --config.batch_size=\d+\n",
        ),
        (
            (),
            r"4 device.*implementation xla\n(.*\n)*for recommended settings give --device or --memory_gib: cpu",
        ),
        (
            ("--device=L4", "--config.grad_cache.chunk_size=64", "--config.grad_cache.keep=-1"),
            r"chunk_size 64, keep 4, implementation triton\n(.*\n)*"
            r"fits; recommended: --config.grad_cache.chunk_size=None --config.grad_cache.keep=0\n",
        ),
        (
            ("--device=H200", "--target=4"),
            r"^GPUs +GiB/GPU +gradient caching +step ms +images/s +efficiency +run\n( +[124] .*%.* minutes\n){3}$",
        ),
        (
            ("--device=L4", "--memory_gib=0.1"),
            r"does not fit; recommended: .*chunk_size=\d+.*\n.*\nwith the recommended settings, estimated step: .*\n"
            r"forward .*, recompute ",
        ),
        (("--device=L4", "--memory_gib=0.001"), r"does not fit; .*\n.*\nestimated step: none, since nothing fits\n"),
        (("--memory_gib=0.001",), r"does not fit; expected memory for a chunk of 4 .*\nlargest batch: none; expected "),
    ],
)
def test_the_command_prints_the_table_and_what_fits(arguments, expected):
    status, stdout, stderr = runs.command(PLAN, QUICKSTART, *arguments)
    assert (status, stderr) == (0, "")
    assert re.search(expected, stdout), stdout
    assert re.search(r"stored activations +[\d.]+ .*traced", stdout) or "--target=4" in arguments
    assert ("estimated step: " in stdout) == ("--device" in str(arguments) and "--target=4" not in arguments)


WRONG = {
    "unknown device": ((QUICKSTART, "--device=H999"), "among .*H200-141.*'H999'"),
    "uneven batch": ((QUICKSTART, "--device=L4", "--devices=3"), "multiple of the 3 devices, got 256"),
    "no devices": ((QUICKSTART, "--devices=0"), "--devices > 0, got 0"),
    "no target": ((QUICKSTART, "--device=L4", "--target=0"), "--target from 1 to 1024 with --device, got 0"),
    "target without device": ((QUICKSTART, "--target=8"), "--target from 1 to 1024 with --device, got 8"),
    "no memory": ((QUICKSTART, "--memory_gib=-1"), "--memory_gib > 0, got -1"),
    "kept in unknown memory": (
        (QUICKSTART, "--config.grad_cache.chunk_size=64", "--config.grad_cache.keep=-1"),
        "grad_cache.keep >= 0 on devices that do not report their memory, got -1",
    ),
}


@pytest.mark.parametrize("mistake", list(WRONG))
def test_a_mistake_is_one_line(mistake):
    arguments, message = WRONG[mistake]
    status, _, stderr = runs.command(PLAN, *arguments)
    assert status == 1
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", stderr), stderr
