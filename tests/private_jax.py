"""Private names of JAX that tests replace, checked with JAX 0.11.2 and 0.12.0.1."""

import contextlib
import types

import jax
import numpy as np


@contextlib.contextmanager
def checked_names():
    """Name the checked versions if JAX lacks a private name."""
    try:
        yield
    except (ImportError, AttributeError, StopIteration) as error:
        raise AttributeError(
            f"expected JAX 0.11.2 or 0.12.0.1, whose private names were checked, got {jax.__version__}; adapt "
            "tests/private_jax.py"
        ) from error


def pretend_cudnn(monkeypatch):
    """Let JAX lower attention for cuDNN without cuDNN."""
    with checked_names():
        monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_900)


class AnyOf:
    """Equal to each of several primitives, for `match` statements."""

    def __init__(self, *primitives):
        self.primitives = primitives

    def __eq__(self, other):
        return any(other is p for p in self.primitives)


def complete_gpu_interpreter(monkeypatch):
    """Complete wgmma in Pallas' interpreter of GPU kernels.

    It lacks accumulator stores and left operands in registers.
    """
    with checked_names():
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

        _store_accumulators(monkeypatch, gpu_callbacks, jaxpr_interpret)
        _read_registers(monkeypatch, gpu_callbacks)


def _store_accumulators(monkeypatch, gpu_callbacks, jaxpr_interpret):
    primitives = jaxpr_interpret.gpu_primitives
    store = primitives.wgmma_accumulator_store_p

    def access(value=None, *, token, key, thread, location):
        memory, key = gpu_callbacks._get_shared_memory(), gpu_callbacks.HostAllocationKey.from_array(key)
        where = memory.access(key, ())
        info = gpu_callbacks.memory.GPULoggingInfo(location, thread, None)
        if value is not None:
            memory.store_buffer_content(key, where, np.asarray(value), thread, logging_info=info)
        return token, memory.get_buffer_content(key, where, thread, logging_info=info)[0]

    def interpret(self, eqn, token, operands):
        key, *value = operands()
        shapes = gpu_callbacks.TOKEN_SHAPE_DTYPE, eqn.outvars[0].aval
        return jaxpr_interpret.callback.io_callback(
            access, shapes, *value, token=token, key=key, thread=self.thread, location=self.mesh_location
        )

    both = {"wgmma_accumulator_deref_p": AnyOf(primitives.wgmma_accumulator_deref_p, store)}
    monkeypatch.setattr(jaxpr_interpret, "gpu_primitives", types.SimpleNamespace(**vars(primitives) | both))
    interpreter = next(c for c in vars(jaxpr_interpret).values() if hasattr(c, "_interpret_wgmma_accumulator_deref_p"))
    monkeypatch.setattr(interpreter, "_interpret_wgmma_accumulator_deref_p", interpret)


def _read_registers(monkeypatch, gpu_callbacks):
    original = gpu_callbacks.wgmma

    def wgmma(*, a_allocation_key_as_array, **others):
        left = np.asarray(a_allocation_key_as_array)
        if left.ndim == 1:
            return original(a_allocation_key_as_array=a_allocation_key_as_array, **others)
        memory = gpu_callbacks._get_shared_memory()
        thread = others["thread"]
        info = gpu_callbacks.memory.GPULoggingInfo(others["mesh_location"], thread, others["source_info"])

        def address(name):
            key = gpu_callbacks.HostAllocationKey.from_array(others[f"{name}_allocation_key_as_array"])
            transforms = gpu_callbacks._remove_noop_transforms(others[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        def content(name):
            return memory.get_buffer_content(*address(name), thread, logging_info=info)[0]

        acc = content("acc")
        acc = acc + np.matmul(left, content("b"), dtype=acc.dtype)
        memory.store_buffer_content(*address("acc"), acc, thread, logging_info=info)
        return others["token"]

    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
