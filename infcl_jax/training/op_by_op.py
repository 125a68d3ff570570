"""Evaluation of a traced function op by op, which compiles equal ops once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import Sharding


def run_op_by_op(traced: Any, shardings: Any) -> Any:
    """Evaluate a traced function without arguments on the default device, and place its results.

    An initialization draws hundreds of arrays with few different shapes. In a single program, XLA compiles every draw.
    Op by op, it compiles each shape once. The default device needs memory for one result at a time, besides those
    placed on it.

    Args:
      traced: `jax.jit(function).trace()`.
      shardings: sharding of each result, in the structure of the results.

    Returns:
      The results, each in buffers of its own. Every process computes all of them.
    """
    closed = traced.jaxpr
    producers = {v: number for number, eqn in enumerate(closed.jaxpr.eqns) for v in eqn.outvars}

    def result(atom: Any, sharding: Sharding) -> jax.Array:
        needed, operands = set[int](), [atom]
        while operands:
            operand = operands.pop()
            number = None if isinstance(operand, Literal) else producers.get(operand)
            if number is not None and number not in needed:
                needed.add(number)
                operands += closed.jaxpr.eqns[number].invars
        eqns = [closed.jaxpr.eqns[number] for number in sorted(needed)]
        (value,) = jaxpr_as_fun(closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns, outvars=[atom])))()
        value = jnp.array(value, atom.aval.dtype)  # a copy: the value may be a constant, or a Python number
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        return jax.make_array_from_callback(value.shape, sharding, np.asarray(value).__getitem__)

    leaves, structure = jax.tree.flatten(shardings)
    return jax.tree.unflatten(structure, map(result, closed.jaxpr.outvars, leaves))
