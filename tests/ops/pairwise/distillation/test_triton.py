"""Triton kernels of distillation, interpreted or compiled without a GPU."""

import jax
import jax.numpy as jnp
import pytest
import triton_compile
import triton_interpreter
from gpus import ALONE
from oracle_distillation import check, make

from infcl_jax.ops.pairwise.distillation.block import DistillationGradient
from infcl_jax.ops.pairwise.distillation.fused import DistillationFused
from infcl_jax.ops.pairwise.distillation.triton import DistillationTriton
from infcl_jax.ops.pairwise.triton import TritonConfig

WIDE = DistillationTriton(TritonConfig(block_m=32, block_n=64, block_d=16, group_m=2), 80)
TALL = DistillationTriton(TritonConfig(block_m=64, block_n=32, block_d=16, group_m=3), 80)


@pytest.fixture
def interpreter(monkeypatch):
    triton_interpreter.install(monkeypatch)
    with jax.sharding.use_abstract_mesh(ALONE):
        yield


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (WIDE, {"masked": True}),
        (TALL, {"own": False, "teacher_dtype": jnp.float32, "teacher_dim": 20}),
        pytest.param(
            WIDE, {"kind": "aligned", "scale": 100.0, "teacher_scale": 90.0, "masked": True}, marks=pytest.mark.slow
        ),
        (TALL, {"dtype": jnp.float32, "dim": 30, "scale": 1.0}),
    ],
    ids=["masked", "another teacher", "scale 100", "fp32"],
)
def test_options_match_oracle(interpreter, k, options):
    check(DistillationFused(k), make(**{"bx": 150, "by": 130, "dim": 40} | options), rounding=2)


@pytest.mark.parametrize(
    "needs_grad", [DistillationGradient(x=False, scale=False), DistillationGradient(x=False, y=False)]
)
def test_only_needed_gradients(interpreter, needs_grad):
    check(DistillationFused(WIDE), make(dim=16, teacher_dim=16), needs_grad=needs_grad, rounding=2)


KERNELS = """
from infcl_jax.ops.pairwise.distillation.kernel_api import DistillationOperands, DistillationWeights
from infcl_jax.ops.pairwise.distillation.triton import KERNELS

scale = jnp.ones(1)

def calls(k, w):
    own = DistillationOperands(x, y, x, y, scale, scale, r, r, None, labels, labels[:4], labels[:4])
    other = own._replace(column_masked=c, labels=None, lowest=None, highest=None)
    return (
        k.sums(own, w, (one, six)),
        k.sums(other, w, (six, one)),
        k.ds(own, DistillationWeights(r, c, r, c, r), w, (one, one), terms=1, moments=True),
        k.ds(other, DistillationWeights(r, c, r, c, None), w, (six, one), terms=2, moments=False),
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", triton_compile.CAPABILITIES)
def test_kernels_compile_without_a_gpu(capability):
    triton_compile.check(capability, KERNELS, 4)
