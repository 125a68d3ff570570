"""Memory of an encoder's activations from shapes alone: its jaxpr is traced, nothing is compiled or computed.

Arrays that are stored are counted from where they are computed to where they are last used: arguments and results of
matrix products, kernels and the like. What XLA computes element by element in between is not stored, and its arguments
live until it is used. See `infcl_jax.planner.plan_memory` for how close that comes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from infcl_jax.models import CLIP, RESIDUAL, TOWERS
from infcl_jax.ops.common.gpu import compute_capability

# Rows of the two traces between which memory is taken to be linear.
_FEW, _MANY = 64, 128


class Linear(NamedTuple):
    """Bytes that grow with the rows."""

    fixed: int
    per_row: int

    def __call__(self, rows: int) -> int:
        """Bytes for so many rows, none for no rows."""
        return self.fixed + self.per_row * rows if rows else 0


class Tower(NamedTuple):
    """Memory of one encoder, forward and backward.

    Attributes:
      kept: what the backward pass needs of the forward pass, without parameters and input.
      peak: the most at one time during both passes; more than `kept` by what lives for a moment.
      forward: the most at one time without a backward pass.
      residual: of what is kept, the residual stream.
      row: bytes of one row of its input.
    """

    kept: Linear
    peak: Linear
    forward: Linear
    residual: Linear
    row: int

    def momentary(self, rows: int) -> int:
        """What lives for a moment beside what is kept."""
        return max(0, self.peak(rows) - self.kept(rows))


def row_shapes(model: CLIP, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch: uint8 images and int32 token ids."""
    size = model.visual.image_size  # type: ignore[attr-defined]
    return {
        "image": jax.ShapeDtypeStruct((rows, size, size, 3), jnp.uint8),
        "text": jax.ShapeDtypeStruct((rows, model.text.context_length), jnp.int32),  # type: ignore[attr-defined]
    }


@functools.lru_cache(maxsize=32)
def parameter_shapes(model: CLIP) -> Any:
    """The tree of the model's parameters as shapes."""
    return jax.eval_shape(model.init, _key(), *row_shapes(model, 1).values())["params"]


def towers(model: CLIP) -> tuple[Tower, ...]:
    """Both encoders of a model, images first, as they run on the device that is traced for."""
    return _towers(model, compute_capability())


@functools.lru_cache(maxsize=32)
def _towers(model: CLIP, capability: str | None) -> tuple[Tower, ...]:
    """`capability`: what is traced depends on it, too."""
    return tuple(_tower(model, name) for name in TOWERS)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _tower(model: CLIP, name: str) -> Tower:
    params, key = parameter_shapes(model), _key()
    params = {TOWERS[name]: params[TOWERS[name]]}

    def encode(params: Any, rows: Any, key: jax.Array) -> Any:
        return model.apply({"params": params}, rows, train=True, method=f"encode_{name}", rngs={"dropout": key})

    def both(params: Any, rows: Any, key: jax.Array, cotangent: jax.Array) -> tuple[Any, Callable]:
        _, pull = jax.vjp(lambda params: encode(params, rows, key), params)
        return pull(cotangent), pull

    def measure(count: int) -> tuple[int, int, int, int]:
        rows = row_shapes(model, count)[name]
        forward, features = jax.make_jaxpr(encode, return_shape=True)(params, rows, key)
        jaxpr = jax.make_jaxpr(both)(params, rows, key, features).jaxpr
        gradients = len(jax.tree.leaves(params))
        _, buffers = _operations(jaxpr)
        given = {buffers[v] for v in (*jaxpr.invars, *jaxpr.constvars)}
        kept = {buffers[v] for v in _variables(jaxpr.outvars[gradients:])} - given
        peak = _peak(jaxpr, gradients)
        return sum(buffer.size for buffer in kept), peak, _peak(forward.jaxpr), _named(forward.jaxpr, RESIDUAL)

    kept, peak, forward, residual = (_line(*pair) for pair in zip(measure(_FEW), measure(_MANY), strict=True))
    return Tower(kept, peak, forward, residual, tree_bytes(row_shapes(model, 1)[name]))


def _line(few: int, many: int) -> Linear:
    per_row = (many - few) // (_MANY - _FEW)
    return Linear(max(0, few - per_row * _FEW), per_row)


@dataclasses.dataclass(frozen=True, eq=False)
class _Buffer:
    """An array; None: a literal, which takes no memory."""

    array: Any

    @property
    def size(self) -> int:
        """Bytes."""
        return 0 if self.array is None else _bytes(self.array)


class _Operation(NamedTuple):
    """What is computed from buffers. `fused`: in the loop of what uses it, if that is a fused one too."""

    reads: list[_Buffer]
    writes: list[_Buffer]
    fused: bool
    inner: int


def _peak(jaxpr: Any, count: int | None = None) -> int:
    """The most bytes that live at one time, without inputs and the first `count` results; constants cost nothing."""
    operations, buffers = _operations(jaxpr)
    results = {buffers[v] for v in _variables(jaxpr.outvars[:count])}
    stored = results | {buffer for o in operations if not o.fused for buffer in (*o.reads, *o.writes)}
    last: dict[_Buffer, int] = {}
    for place, operation in reversed(list(enumerate(operations))):
        # What is never stored is computed where it is used, and its arguments have to live until then.
        needed = max((place, *(last.get(buffer, place) for buffer in operation.writes if buffer not in stored)))
        for buffer in operation.reads:
            last[buffer] = max(needed, last.get(buffer, needed))
    ending: dict[int, list[_Buffer]] = {}
    for buffer, place in last.items():
        ending.setdefault(place, []).append(buffer)
    counted: set[_Buffer] = set()
    live = most = 0
    for place, operation in enumerate(operations):
        if operation.reads:
            made = {
                buffer for buffer in operation.writes if buffer in last and buffer in stored and buffer not in results
            }
            live, counted = live + sum(buffer.size for buffer in made), counted | made
        most = max(most, live + operation.inner)
        live -= sum(buffer.size for buffer in ending.get(place, ()) if buffer in counted)
    return most


def _operations(jaxpr: Any) -> tuple[list[_Operation], dict[Any, _Buffer]]:
    """What a jaxpr and the functions that it calls compute, and the buffers of the jaxpr's variables."""
    buffers = {v: _Buffer(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars)}
    return list(_flat(jaxpr, buffers)), buffers


def _flat(jaxpr: Any, buffers: dict[Any, _Buffer]) -> Iterator[_Operation]:
    """`_operations` one by one; `buffers` has those of the arguments, the others are added."""
    for eqn in jaxpr.eqns:
        reads, name = [buffers[v] for v in _variables(eqn.invars)], eqn.primitive.name
        called = list(_parts(eqn.params.values()))
        if name in _CALLS and len(called) == 1 and len(called[0].invars) == len(eqn.invars):
            (inner,) = called  # one object for all calls of a function, hence buffers for each call
            own = {v: _Buffer(v.aval) for v in inner.constvars}
            own |= {v: _buffer(a, buffers) for v, a in zip(inner.invars, eqn.invars, strict=True)}
            yield from _flat(inner, own)
            buffers |= {v: _buffer(a, own) for v, a in zip(eqn.outvars, inner.outvars, strict=True)}
        elif name in _VIEWS and len(reads) == len(eqn.outvars):
            buffers |= dict(zip(eqn.outvars, reads, strict=True))
        else:
            writes = [_Buffer(v.aval) for v in eqn.outvars]
            buffers |= dict(zip(eqn.outvars, writes, strict=True))
            inside = 0 if name in _KERNELS else max(map(_peak, called), default=0)
            yield _Operation(reads, writes, name in _FUSED and not called, inside)


def _buffer(atom: Any, buffers: dict[Any, _Buffer]) -> _Buffer:
    """Of a variable or a literal."""
    return _Buffer(None) if isinstance(atom, Literal) else buffers[atom]


# What works in other memory; functions that are called where they stand; what returns its argument; what XLA computes
# element by element.
_KERNELS = frozenset({"custom_vmap_call"})  # of `plgpu.kernel`
_CALLS = frozenset({"pjit", "jit", "closed_call", "core_call", "custom_vjp_call", "custom_jvp_call", "remat2"})
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "name", "optimization_barrier", "stop_gradient", "copy"})
_FUSED = frozenset(
    (
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "cos", "div", "eq", "erf", "exp"),
        *("exp2", "expm1", "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic"),
        *("lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_and", "reduce_max", "reduce_min"),
        *("reduce_sum", "rem", "rsqrt", "select_n", "sign", "sin", "split", "sqrt", "square", "sub", "tanh", "xor"),
    )
)


def _named(jaxpr: Any, name: str) -> int:
    """Bytes of what has the name in a jaxpr or in what it calls, but for remat, which hides its names."""
    inner = (part for eqn in jaxpr.eqns if eqn.primitive.name != "remat2" for part in _parts(eqn.params.values()))
    own = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "name" and eqn.params["name"] == name)
    return sum(_bytes(eqn.outvars[0].aval) for eqn in own) + sum(_named(part, name) for part in inner)


def _variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (a for a in atoms if not isinstance(a, Literal))


def _parts(values: Iterable[Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters: of calls, loops, branches, rematerialised functions."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _parts(value)
        elif hasattr(value, "jaxpr"):
            yield value.jaxpr
        elif hasattr(value, "eqns"):
            yield value


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
