"""OpenCLIP's benchmarks, up to the calls that need OpenCLIP installed."""

import importlib.util
import re

import pytest
import runs

from experiments.benchmarks.open_clip import Settings

without_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="has PyTorch")
INTEGERS = "positive integers such as 1024,4096"
MISSING = "expected PyTorch and OpenCLIP, got: .*; pip install open_clip_torch"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        pytest.param("open_clip", "--output=runs", MISSING, marks=without_torch),
        ("open_clip", "--output=runs --batch=12,x", f"expected --batch to be {INTEGERS}, got '12,x'"),
        ("open_clip", "--output=runs extra", r"expected flags only \(--name=value\), got extra"),
        ("open_clip", "--output=", "expected --output, the folder for the results, got none"),
        pytest.param("open_clip_loss", "", MISSING, marks=without_torch),
        ("open_clip_loss", "--features=0", f"expected --features to be {INTEGERS}, got '0'"),
        pytest.param("open_clip_encode", "--data=0.tar", MISSING, marks=without_torch),
        ("open_clip_encode", "", "expected --data, the tar files, got none"),
    ],
)
def test_a_mistake_is_one_line(command, arguments, message):
    status, stdout, stderr = runs.command(f"experiments.benchmarks.{command}", *arguments.split())
    assert (status, stdout) == (1, "")
    assert re.fullmatch(f"error: {message}\n", stderr), stderr


def test_parts_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match="multiples of --accum_freq=3, got 4"):
        Settings(model="ViT-B-32", batch=4, accum_freq=3)
