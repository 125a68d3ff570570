"""Registers of attention's Hopper kernels, assembled without a GPU."""

import cuda_plugin
import pytest

TOWERS = [(50,), (77, "causal"), (197,), (128, "causal", "spans")]
# Every number of tiles, with a last tile of each width, and every mask.
OTHERS = [
    (1,),
    (64, "causal"),
    (96,),
    (112, "causal"),
    (128,),
    (144, "causal"),
    (192, "causal"),
    (257,),
    (320,),
    (320, "causal"),
    (64, "spans"),
    (128, "spans"),
    (192, "causal", "spans"),
    (256, "spans"),
    (256, "causal", "spans"),
    (320, "causal", "spans"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*TOWERS, *(pytest.param(case, marks=pytest.mark.full) for case in OTHERS)], ids=str)
def test_attention_spills_no_registers(case):
    assert cuda_plugin.assembled("assemble_attention.py", *map(str, case)) == (2, {"0"})
