"""The benchmark of decoding."""

import re

import jax
import pytest
import runs
from decoders import StandIn

from experiments.benchmarks.decode import device_rate
from experiments.benchmarks.photographs import encode, photograph


def test_decode_benchmark_prints_a_rate_for_each_way():
    status, stdout, stderr = runs.command("experiments.benchmarks.decode", "--decode_seconds=0", "--decode_files=2")
    assert (status, stderr) == (0, "")
    assert re.search(r"2 JPEGs of 6\d kB", stdout)
    for way in ("decode and crop, reduced by the DCT", "decode in full, then crop"):
        assert re.search(rf"[1-9][\d.]* images/s  {way}", stdout)


def test_rate_of_a_decoder_leaves_out_its_first_call():
    decoder, files = StandIn(jax.devices()[0]), [encode(photograph(seed, 48, 64)) for seed in range(2)]
    assert device_rate(decoder, files, 3, 0.0) > 0
    assert decoder.decoded == 2 * 3


def test_a_decoder_that_refuses_files_has_no_rate():
    decoder = StandIn(jax.devices()[0], refuses=lambda data: True)
    with pytest.raises(ValueError, match="refuses 3 of 3"):
        device_rate(decoder, [encode(photograph(0, 48, 64))], 3, 0.0)
