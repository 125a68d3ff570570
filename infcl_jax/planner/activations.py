"""Activation memory of an encoder, from a traced jaxpr without compilation.

XLA materializes the operands and results of GEMMs, kernels and other ops that it does not fuse. Each one takes memory
from its definition to its last use. Elementwise ops are assumed fused: their results take no memory, and their operands
stay live until the fused result is used. `infcl_jax.planner.plan_memory` states the accuracy.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from infcl_jax.models import CLIP, RESIDUAL, TextPair, towers_of, variable_shapes
from infcl_jax.models.clip import row_shapes
from infcl_jax.ops.common.gpu import compute_capability
from infcl_jax.training.frozen import frozen_towers, merge, module_modes, partition

# Rows of the two traces from which a linear function of the rows is fitted: enough for the kernels of large batches.
_FEW, _MANY = 1024, 2048
# Kernels of `plgpu.kernel`, whose inner arrays are in registers and SMEM.
_KERNELS = frozenset({"custom_vmap_call"})
# Function calls to inline.
_CALLS = frozenset({"pjit", "jit", "closed_call", "core_call", "custom_vjp_call", "custom_jvp_call", "remat2"})
# Ops whose result shares the buffer of their argument.
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "name", "optimization_barrier", "stop_gradient", "copy"})
# Elementwise ops and reductions that XLA fuses.
_FUSED = frozenset(
    (
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "cos", "div", "eq", "erf", "exp"),
        *("exp2", "expm1", "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic"),
        *("lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_and", "reduce_max", "reduce_min"),
        *("reduce_sum", "rem", "rsqrt", "select_n", "sign", "sin", "split", "sqrt", "square", "sub", "tanh", "xor"),
    )
)


class Linear(NamedTuple):
    """Bytes as a linear function of the rows."""

    fixed: int
    per_row: int

    def __call__(self, rows: int) -> int:
        """Bytes for `rows` rows; 0 for none."""
        return self.fixed + self.per_row * rows if rows else 0


@dataclasses.dataclass(frozen=True)
class EncoderMemory:
    """Memory of one encoder in bytes, as functions of the rows.

    Parameters, inputs and gradients of the parameters are excluded. The encoder is traced for two numbers of rows when
    a function is first read, on the device of that moment.
    """

    model: CLIP | TextPair
    name: str  # of the tower
    frozen: frozenset[str]  # names of the frozen parameters

    @property
    def row_bytes(self) -> int:
        """Bytes of one input row."""
        return tree_bytes(row_shapes(self.model, 1)[self.name])

    @property
    def stored(self) -> Linear:
        """Activations that the forward pass stores for the backward pass."""
        return self._training[0]

    @property
    def peak(self) -> Linear:
        """Peak memory of forward and backward; exceeds `stored` by the transient memory."""
        return self._training[1]

    @property
    def forward(self) -> Linear:
        """Peak memory of the forward pass alone."""
        return self._inference[0]

    @property
    def residual(self) -> Linear:
        """Residual stream, part of `stored`."""
        return self._inference[1]

    @functools.cached_property
    def _training(self) -> tuple[Linear, ...]:
        params, constants, key = self._arguments

        def forward_backward(
            params: Any, constants: Any, rows: Any, key: jax.Array, cotangent: jax.Array
        ) -> tuple[Any, Callable]:
            _, pullback = jax.vjp(lambda params: self._encode(params, constants, rows, key), params)
            return pullback(cotangent), pullback  # the pullback makes the stored activations outputs of the jaxpr

        def measure(count: int) -> tuple[int, int]:
            features = jax.ShapeDtypeStruct((count, feature_width(self.model)), self.model.feature_dtype)
            jaxpr = jax.make_jaxpr(forward_backward)(params, constants, self._rows(count), key, features).jaxpr
            gradients = len(jax.tree.leaves(params))  # the first outputs
            _, buffers = _operations(jaxpr)
            inputs = {buffers[v] for v in (*jaxpr.invars, *jaxpr.constvars)}
            activations = {buffers[v] for v in _variables(jaxpr.outvars[gradients:])} - inputs
            return sum(buffer.size for buffer in activations), _peak(jaxpr, gradients)

        return _linear_fits(measure)

    @functools.cached_property
    def _inference(self) -> tuple[Linear, ...]:
        params, constants, key = self._arguments

        def measure(count: int) -> tuple[int, int]:
            jaxpr = jax.make_jaxpr(self._encode)(params, constants, self._rows(count), key).jaxpr
            return _peak(jaxpr), _named_bytes(jaxpr, RESIDUAL)

        return _linear_fits(measure)

    @property
    def _arguments(self) -> tuple[Any, Any, Any]:
        """Shapes of the trained parameters, of the other variables and of the key."""
        variables = variable_shapes(self.model)
        subtree = towers_of(variables["params"])[self.name]
        params, fixed = partition({subtree: variables["params"][subtree]}, self.frozen)
        return params, {**variables, "params": fixed}, jax.eval_shape(lambda: jax.random.key(0))

    def _rows(self, count: int) -> Any:
        return row_shapes(self.model, count)[self.name]

    def _encode(self, params: Any, constants: Any, rows: Any, key: jax.Array) -> Any:
        whole = {**constants, "params": merge(constants["params"], params)}
        with module_modes(whole["params"], self.frozen):
            return self.model.apply(whole, rows, train=True, method=f"encode_{self.name}", rngs={"dropout": key})


def feature_width(model: CLIP | TextPair) -> int:
    """Feature dimension of a model."""
    tower: Any = model.visual if isinstance(model, CLIP) else model
    return tower.embed_dim


def parameter_shapes(model: CLIP | TextPair) -> Any:
    """Shapes of the model's parameters."""
    return variable_shapes(model)["params"]


def encoder_memory(model: CLIP | TextPair, frozen: frozenset[str] = frozenset()) -> tuple[EncoderMemory, ...]:
    """Memory of both encoders on the device of the trace.

    A tower without trained parameters is traced as if it were trained; its `forward` does not depend on that.
    """
    shapes = parameter_shapes(model)
    prefixes = tuple(f"{towers_of(shapes)[name]}/" for name in frozen_towers(shapes, frozen))
    trained = frozenset(n for n in frozen if not n.startswith(prefixes))
    return _encoder_memory(model, trained, compute_capability())


@functools.lru_cache(maxsize=32)
def _encoder_memory(
    model: CLIP | TextPair, frozen: frozenset[str], capability: str | None
) -> tuple[EncoderMemory, ...]:
    """Cache per compute capability, which selects the traced kernels."""
    return tuple(EncoderMemory(model, name, frozen) for name in row_shapes(model, 1))


def tree_bytes(tree: Any) -> int:
    """Total bytes of the arrays or shapes in a pytree.

    Examples:
      >>> tree_bytes({"kernel": jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)})
      524288
    """
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _linear_fits(measure: Callable[[int], tuple[int, int]]) -> tuple[Linear, ...]:
    """Fit both results of `measure(rows)`, as linear functions of the rows."""
    fits = []
    for few, many in zip(measure(_FEW), measure(_MANY), strict=True):
        per_row = (many - few) // (_MANY - _FEW)
        fits.append(Linear(max(0, few - per_row * _FEW), per_row))
    return tuple(fits)


@dataclasses.dataclass(frozen=True, eq=False)
class _Buffer:
    """Memory of one array, compared by identity; None for a literal, which takes none."""

    array: Any

    @property
    def size(self) -> int:
        """Size in bytes."""
        return 0 if self.array is None else _bytes(self.array)


class _Operation(NamedTuple):
    """One op with its operand and result buffers."""

    reads: list[_Buffer]
    writes: list[_Buffer]
    fused: bool  # by XLA into its consumers
    inner: int  # peak bytes inside the jaxprs that the op calls


def _peak(jaxpr: Any, count: int | None = None) -> int:
    """Peak live bytes of a jaxpr.

    Inputs, constants and the first `count` results (all by default) are not included.
    """
    operations, buffers = _operations(jaxpr)
    results = {buffers[v] for v in _variables(jaxpr.outvars[:count])}
    materialized = results | {buffer for o in operations if not o.fused for buffer in (*o.reads, *o.writes)}
    last_use: dict[_Buffer, int] = {}
    for step, operation in reversed(list(enumerate(operations))):
        # A fused result is computed at its use, so the operands must stay live until then.
        needed = max((step, *(last_use.get(buffer, step) for buffer in operation.writes if buffer not in materialized)))
        for buffer in operation.reads:
            last_use[buffer] = max(needed, last_use.get(buffer, needed))
    freed: dict[int, list[_Buffer]] = {}
    for buffer, step in last_use.items():
        freed.setdefault(step, []).append(buffer)
    allocated: set[_Buffer] = set()
    live = peak = 0
    for step, operation in enumerate(operations):
        if operation.reads:  # ops without operands, such as a broadcast literal, are assumed fused
            new = {b for b in operation.writes if b in last_use and b in materialized and b not in results}
            live, allocated = live + sum(buffer.size for buffer in new), allocated | new
        peak = max(peak, live + operation.inner)
        live -= sum(buffer.size for buffer in freed.get(step, ()) if buffer in allocated)
    return peak


def _operations(jaxpr: Any) -> tuple[list[_Operation], dict[Any, _Buffer]]:
    """Operations of a jaxpr with its calls inlined, and the buffers of its variables."""
    buffers = {v: _Buffer(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars)}
    return list(_inlined(jaxpr, buffers)), buffers


def _inlined(jaxpr: Any, buffers: dict[Any, _Buffer]) -> Iterator[_Operation]:
    """Yield the operations, and add the buffers of their results to the arguments' buffers."""
    for eqn in jaxpr.eqns:
        reads, name = [buffers[v] for v in _variables(eqn.invars)], eqn.primitive.name
        called = list(_jaxprs(eqn.params.values()))
        if name in _CALLS and len(called) == 1 and len(called[0].invars) == len(eqn.invars):
            # All calls of a function share one jaxpr, so each call needs its own buffers.
            (inner,) = called
            inner_buffers = {v: _Buffer(v.aval) for v in inner.constvars}
            inner_buffers |= {v: _buffer(a, buffers) for v, a in zip(inner.invars, eqn.invars, strict=True)}
            yield from _inlined(inner, inner_buffers)
            buffers |= {v: _buffer(a, inner_buffers) for v, a in zip(eqn.outvars, inner.outvars, strict=True)}
        elif name in _VIEWS and len(reads) == len(eqn.outvars):
            buffers |= dict(zip(eqn.outvars, reads, strict=True))
        else:
            writes = [_Buffer(v.aval) for v in eqn.outvars]
            buffers |= dict(zip(eqn.outvars, writes, strict=True))
            inner_peak = 0 if name in _KERNELS else max(map(_peak, called), default=0)
            yield _Operation(reads, writes, name in _FUSED and not called, inner_peak)


def _buffer(atom: Any, buffers: dict[Any, _Buffer]) -> _Buffer:
    """Buffer of a variable or a literal."""
    return _Buffer(None) if isinstance(atom, Literal) else buffers[atom]


def _named_bytes(jaxpr: Any, name: str) -> int:
    """Bytes of checkpointed values of one name, including called jaxprs.

    Rematerialized functions (remat) hide the names inside them.
    """
    inner = (sub for eqn in jaxpr.eqns if eqn.primitive.name != "remat2" for sub in _jaxprs(eqn.params.values()))
    named = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "name" and eqn.params["name"] == name)
    return sum(_bytes(eqn.outvars[0].aval) for eqn in named) + sum(_named_bytes(sub, name) for sub in inner)


def _variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (a for a in atoms if not isinstance(a, Literal))


def _jaxprs(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the jaxprs in an equation's parameters: of calls, loops, branches and rematerialized functions."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _jaxprs(value)
        elif hasattr(value, "jaxpr"):
            yield value.jaxpr
        elif hasattr(value, "eqns"):
            yield value


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
