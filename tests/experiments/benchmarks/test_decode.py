"""The benchmark of decoding."""

import re

import runs


def test_decode_benchmark_prints_a_rate_for_each_way():
    status, stdout, stderr = runs.command("experiments.benchmarks.decode", "--decode_seconds=0", "--decode_files=2")
    assert (status, stderr) == (0, "")
    assert re.search(r"2 JPEGs of 6\d kB", stdout)
    for way in ("decode and crop, reduced by the DCT", "decode in full, then crop"):
        assert re.search(rf"[1-9][\d.]* images/s  {way}", stdout)
