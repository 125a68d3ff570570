"""Evaluation of a traced function result by result, which compiles equal computations once."""

from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import Sharding


class _Computation(NamedTuple):
    """Computation of one result, with its literals as arguments.

    Attributes:
      closed: ClosedJaxpr with a variable in place of each literal.
      arguments: the literals.
      key: equal for computations that differ in their arguments alone.
    """

    closed: Any
    arguments: list[np.ndarray]
    key: Hashable


def run_by_result(traced: Any, shardings: Any) -> Any:
    """Evaluate a traced function without arguments on the default device, and place its results.

    An initialization draws hundreds of arrays of few different shapes. In a single program, XLA compiles every draw.
    Result by result, it compiles one program per shape, several at the same time. The default device needs memory for
    one result at a time, besides those placed on it.

    Args:
      traced: `jax.jit(function).trace()`.
      shardings: sharding of each result, in the structure of the results.

    Returns:
      The results, each in buffers of its own. Every process computes all of them.
    """
    producers = {v: number for number, eqn in enumerate(traced.jaxpr.eqns) for v in eqn.outvars}
    computations = [_computation(traced.jaxpr, producers, atom) for atom in traced.jaxpr.jaxpr.outvars]
    distinct = {computation.key: computation for computation in computations}
    lowered = [jax.jit(jaxpr_as_fun(each.closed)).lower(*each.arguments) for each in distinct.values()]
    with ThreadPoolExecutor(thread_name_prefix="compile the initialization") as pool:
        programs = dict(zip(distinct, pool.map(lambda program: program.compile(), lowered), strict=True))

    def result(computation: _Computation, sharding: Sharding) -> jax.Array:
        (value,) = programs[computation.key](*computation.arguments)
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        return jax.make_array_from_callback(value.shape, sharding, np.asarray(value).__getitem__)

    leaves, structure = jax.tree.flatten(shardings)
    return jax.tree.unflatten(structure, map(result, computations, leaves))


def _computation(closed: Any, producers: Mapping[Var, int], atom: Any) -> _Computation:
    """Return the computation of a result of a ClosedJaxpr without arguments.

    Args:
      closed: the ClosedJaxpr.
      producers: number of the equation that computes each variable.
      atom: the result.
    """
    needed, operands = set[int](), [atom]
    while operands:
        operand = operands.pop()
        number = None if isinstance(operand, Literal) else producers.get(operand)
        if number is not None and number not in needed:
            needed.add(number)
            operands += closed.jaxpr.eqns[number].invars
    eqns = [closed.jaxpr.eqns[number] for number in sorted(needed)]
    arguments = dict[Var, np.ndarray]()

    def lifted(operand: Any) -> Any:
        if not isinstance(operand, Literal):
            return operand
        aval: Any = operand.aval
        variable = Var(aval)
        arguments[variable] = np.asarray(operand.val, aval.dtype)
        return variable

    eqns = [eqn.replace(invars=[lifted(operand) for operand in eqn.invars]) for eqn in eqns]
    outvar = lifted(atom)
    jaxpr = closed.jaxpr.replace(eqns=eqns, invars=list(arguments), outvars=[outvar])
    return _Computation(closed.replace(jaxpr=jaxpr), list(arguments.values()), _key(jaxpr))


def _key(jaxpr: Any) -> Hashable:
    """Return a key that two jaxprs share if they differ in the names of their variables alone."""
    numbers = {v: number for number, v in enumerate((*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)))}

    def operands(atoms: list[Any]) -> tuple[Hashable, ...]:
        return tuple((numbers.get(atom, atom), atom.aval) for atom in atoms)  # constants of the function stay variables

    return tuple((eqn.primitive, _parameters(eqn), operands(eqn.invars)) for eqn in jaxpr.eqns), operands(jaxpr.outvars)


def _parameters(eqn: JaxprEqn) -> Hashable:
    """Return the parameters of an equation, or, if they have no hash, a key that is that equation's alone."""
    parameters = tuple(sorted(eqn.params.items()))
    try:
        hash(parameters)
    except TypeError:
        return id(eqn)
    return parameters
