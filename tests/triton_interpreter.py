"""Triton's interpreter behind `jax_triton.triton_call`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.ops.pairwise import triton as kernels


class HostTensor:
    """The subset of a torch tensor that the interpreter uses."""

    def __init__(self, array=None):
        self.array = array

    @property
    def dtype(self):
        return {"float32": "fp32", "int32": "i32", "bfloat16": "bf16"}[self.array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, size, device):
        return HostTensor()

    def set_(self, storage, offset, size, stride):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def copy_(self, other):
        assert other.array is self.array


def interpreted_call(*, kernel, out_type, grid, **arguments):
    """Runs `jax_triton.triton_call` on the CPU.

    Features are passed as fp32, because the interpreter cannot multiply bf16.
    """
    arguments = {n: a for n, a in arguments.items() if n in kernel.arg_names}
    arrays = {n: a for n, a in arguments.items() if isinstance(a, jax.Array)}

    def on_host(arrays):
        out = [np.full(t.shape, np.nan, t.dtype) for t in out_type]
        given = {
            n: HostTensor(np.array(a, np.float32 if a.dtype == jnp.bfloat16 else a.dtype)) for n, a in arrays.items()
        }
        given = arguments | given
        results = [n for n in kernel.arg_names if n not in given]
        with np.errstate(over="ignore"):  # exponentials may be infinite
            kernel[grid](**given, **{n: HostTensor(o) for n, o in zip(results, out, strict=True)})
        return tuple(out)

    if not any(isinstance(a, jax.core.Tracer) for a in arrays.values()):
        return tuple(jnp.asarray(o) for o in on_host(jax.device_get(arrays)))
    return jax.pure_callback(on_host, tuple(out_type), arrays)


def install(monkeypatch):
    """Run kernels in Triton's interpreter, see `TRITON_INTERPRET` in conftest.py."""
    pytest.importorskip("triton", "3.7")
    monkeypatch.setattr(pytest.importorskip("jax_triton"), "triton_call", interpreted_call)
    kernels.load.cache_clear()
