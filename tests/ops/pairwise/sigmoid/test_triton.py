"""Triton kernels of the sigmoid loss, interpreted or compiled without a GPU, or on one."""

import jax
import jax.numpy as jnp
import pytest
import triton_compile
import triton_interpreter
from gpus import ALONE
from oracle_sigmoid import check, make

from infcl_jax.ops.pairwise.sigmoid.block import SigmoidGradient
from infcl_jax.ops.pairwise.sigmoid.fused import SigmoidFused
from infcl_jax.ops.pairwise.sigmoid.triton import SigmoidTriton
from infcl_jax.ops.pairwise.triton import TritonConfig

WIDE = SigmoidTriton(TritonConfig(block_m=32, block_n=64, block_d=16, group_m=2), 80)
TALL = SigmoidTriton(TritonConfig(block_m=64, block_n=32, block_d=16, group_m=3), 80)


@pytest.fixture
def interpreter(monkeypatch):
    triton_interpreter.install(monkeypatch)
    with jax.sharding.use_abstract_mesh(ALONE):
        yield


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (WIDE, {"ids": 12, "bias": 0.0}),
        (TALL, {"masked": True}),
        (TALL, {"ids": None, "scale": 100.0, "bias": -100.0}),
        pytest.param(WIDE, {"kind": "aligned", "scale": 100.0, "bias": -30.0, "masked": True}, marks=pytest.mark.slow),
        (TALL, {"dtype": jnp.float32, "dim": 30, "scale": 1.0, "bias": 10.0, "ids": 40}),
    ],
    ids=["ids", "masked", "scale 100", "aligned", "fp32"],
)
def test_options_match_oracle(interpreter, k, options):
    check(SigmoidFused(k), make(**{"bx": 150, "by": 130, "dim": 40} | options), rounding=2)


@pytest.mark.parametrize(
    "needs_grad", [SigmoidGradient(x=False, scale=False), SigmoidGradient(scale=False, bias=False)]
)
def test_only_needed_gradients(interpreter, needs_grad):
    check(SigmoidFused(WIDE), make(dim=16), needs_grad=needs_grad, rounding=2)


KERNELS = """
from infcl_jax.ops.pairwise.sigmoid.kernel_api import Matches, SigmoidOperands, SigmoidWeights
from infcl_jax.ops.pairwise.sigmoid.triton import KERNELS

scale, columns = jnp.ones(1), jnp.zeros(384, jnp.int32)

def calls(k, w):
    ids = Matches(labels, columns, labels[:2], labels[:2], columns[:3], columns[:3])
    own = SigmoidOperands(x, y, scale, r, None, ids)
    other = own._replace(column_bias=c, matches=None)
    return (
        k.sums(own, w, one),
        k.sums(other, w, six),
        k.ds(own, SigmoidWeights(r, r), w, one, terms=1, moments=True),
        k.ds(other, SigmoidWeights(r, None), w, six, terms=2, moments=False),
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [*triton_compile.CAPABILITIES[:-1], "9.0"])
def test_kernels_compile_without_a_gpu(capability):
    triton_compile.check(capability, KERNELS, 4)
