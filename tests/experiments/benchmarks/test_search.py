"""Benchmark of nearest-neighbor search."""

import re

import runs


def test_the_search_is_exact_and_its_figures_agree():
    flags = ("--rows=500", "--dim=16", "--neighbors=3", "--checked=200", "--recall", "--peers")
    out = runs.command("experiments.benchmarks.search", *flags).stdout
    assert re.search(r"500 x 500 rows of 16, k = 3, \d+ devices: [\d.]+ s", out)
    assert "0 of 200 queries differ from brute force in float64" in out
    assert re.search(r"of an fp32 GEMM's [\d.e+-]+$", out, re.MULTILINE)
    assert re.search(r"recall in both directions: [\d.]+ s, \{'image_to_text_r1': ", out)
    for peer in ("torch", "FAISS"):
        assert re.search(rf"{peer} is not installed|{peer}: [\d.]+ s, other neighbors .* in \d+ queries", out)
