"""OpenCLIP's benchmark, up to the calls that need OpenCLIP installed."""

import importlib.util
import re

import pytest
import runs

from experiments.benchmarks.open_clip import Settings

COMMAND = "experiments.benchmarks.open_clip"
without_open_clip = pytest.mark.skipif(importlib.util.find_spec("open_clip") is not None, reason="has OpenCLIP")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            (), "expected PyTorch and OpenCLIP, got: .*; pip install open_clip_torch", marks=without_open_clip
        ),
        (("--batch=12,x",), "expected --batch to be positive integers such as 1024,4096, got '12,x'"),
        (("extra",), r"expected flags only \(--name=value\), got extra"),
        (("--output=",), "expected --output, the folder for the results, got none"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, message):
    status, stdout, stderr = runs.command(COMMAND, f"--output={tmp_path}", *arguments)
    assert (status, stdout) == (1, "")
    assert re.fullmatch(f"error: {message}\n", stderr), stderr


def test_parts_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match="multiples of --accum_freq=3, got 4"):
        Settings(model="ViT-B-32", batch=4, accum_freq=3)
