"""Errors of derivatives that a custom gradient rule does not support.

`jax.custom_vjp` alone fails in forward mode and in second derivatives with errors about its own parts, or returns
zeros. Each function here is an identity that adds nothing to compiled programs of supported derivatives.
"""

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def only_reverse(tree: Any, advice: str) -> Any:
    """Raise an error in forward mode, for the inputs of a rule.

    Args:
      tree: arrays; those that are not floating are ignored.
      advice: what to use instead, the last clause of the error message.

    Raises:
      ValueError: in forward mode, when it is evaluated or compiled.
    """
    message = (
        "expected reverse mode (jax.grad or jax.vjp) through this loss, got forward mode (jax.jvp, jax.jacfwd or "
        f"jax.linearize); {advice}"
    )
    return _each(lambda a: _only_reverse(a, message), tree)


def not_reversed(tree: Any, advice: str) -> Any:
    """Raise an error in reverse mode, for the results of a reverse-mode rule.

    Args:
      tree: arrays; those that are not floating are ignored.
      advice: what to use instead, the last clause of the error message.

    Raises:
      ValueError: in reverse mode over reverse mode.
    """
    message = f"expected one level of reverse mode through this loss, got reverse over reverse; {advice}"
    return _each(lambda a: _not_reversed(a, message), tree)


def not_differentiated(tree: Any, inputs: Any, advice: str) -> Any:
    """Raise an error where `tree` is differentiated with respect to `inputs`.

    Args:
      tree: arrays to return.
      inputs: arrays that must have no tangents.
      advice: what to use instead, the last clause of the error message.

    Raises:
      ValueError: an array of `tree` or `inputs` has a tangent.
    """
    return _not_differentiated(
        f"expected first derivatives of this loss in reverse mode, got second derivatives; {advice}", tree, inputs
    )


def first_derivative(block: Any) -> Any:
    """Raise an error where fused kernels, which JAX cannot differentiate, are differentiated.

    Raises:
      ValueError: an array of `block` has a tangent.
    """
    return not_differentiated(block, block, 'use implementation="xla" instead of fused kernels')


def _each(function: Any, tree: Any) -> Any:
    # Each array by itself: an array without tangent keeps none.
    return jax.tree.map(lambda a: function(a) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def _fail(*_: Any, message: str) -> NoReturn:
    raise ValueError(message)


# Identity of a tangent that has a transpose alone, so that evaluating it fails. With the primal as second argument, a
# derivative of forward mode fails here too, not in `jax.custom_vjp`.
_transposed_only = Primitive("transposed_only")
_transposed_only.def_impl(_fail)
_transposed_only.def_abstract_eval(lambda aval, primal, *, message: aval)
ad.primitive_jvps[_transposed_only] = _fail
ad.primitive_transposes[_transposed_only] = lambda cotangent, *_, message: [cotangent, None]
batching.defbroadcasting(_transposed_only)
mlir.register_lowering(_transposed_only, _fail)

# Identity without a transpose.
_not_transposed = Primitive("not_transposed")
_not_transposed.def_impl(lambda array, *, message: array)
_not_transposed.def_abstract_eval(lambda aval, *, message: aval)
ad.deflinear2(_not_transposed, _fail)
batching.defvectorized(_not_transposed)
mlir.register_lowering(_not_transposed, lambda _, array, *, message: [array])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _only_reverse(array: jax.Array, message: str) -> jax.Array:
    return array


@_only_reverse.defjvp
def _tangent_only_reverse(message: str, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return primals[0], _transposed_only.bind(tangents[0], primals[0], message=message)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _not_reversed(array: jax.Array, message: str) -> jax.Array:
    return array


@_not_reversed.defjvp
def _tangent_not_reversed(message: str, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return primals[0], _not_transposed.bind(tangents[0], message=message)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _not_differentiated(message: str, tree: Any, inputs: Any) -> Any:
    return tree


@_not_differentiated.defjvp
def _tangent_not_differentiated(message: str, primals: tuple, tangents: tuple) -> NoReturn:
    raise ValueError(message)
