"""Gradients do not depend on other gradients, traced before, after or in the same program.

A program is a sum of calls of one loss. Each call reads one of two batches and may hold arguments constant. The
expected gradient is the sum over calls of the float64 gradient of the dense loss.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import properties
import pytest
import triton_interpreter
from gpus import ALONE, interpreted, under
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from infcl_jax import (
    clip_loss,
    create_samples,
    distillation_loss,
    global_contrastive_loss,
    matryoshka,
    pairwise_lse,
    retrieval_loss,
    siglip_loss,
)
from infcl_jax.ops.pairwise.lse import available_implementations

ROWS, DIM, BATCHES, DEVICES = 8, 5, 2, 2
IMAGE, TEXT, SCALE = 0, 1, 2


def clip_inside(*args, implementation, mesh):
    """`clip_loss` inside `shard_map`, under `jit` because an eager `shard_map` cannot run a `custom_vjp`."""
    if mesh is None:
        return clip_loss(*args, implementation=implementation)
    loss = functools.partial(clip_loss, axis_name="data", implementation=implementation)
    return jax.jit(jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P()))(*args)


def siglip(*args, implementation, mesh):
    if implementation != "dense":
        return siglip_loss(*args, implementation=implementation, mesh=mesh)
    image, text, scale, bias = args
    signs = 2 * jnp.eye(ROWS, dtype=image.dtype) - 1
    return jax.nn.softplus(-signs * (scale * image @ text.T + bias)).sum() / ROWS


def distillation(*args, **options):
    teacher = (jnp.asarray(a, args[IMAGE].dtype) for a in oracle.features("random", ROWS, ROWS, DIM, seed=9))
    return distillation_loss(*args, *teacher, 20.0, **options)


def fastclip(*args, **options):
    settings = {"variant": "fastclip_v3", "gamma": 0.7, "rho": 6.5, "logit_scale": args[SCALE]}
    index = jnp.arange(ROWS, dtype=jnp.int32)
    return global_contrastive_loss(*args[:SCALE], index, create_samples(ROWS), **settings, **options)[0]


def lse(x, y, x_scale, y_scale, *, implementation, mesh):
    """`pairwise_lse` with a scale of each row and column, on one device."""
    assert mesh is None
    scales = (scale * jnp.linspace(1, 2, ROWS, dtype=x.dtype) for scale in (x_scale, y_scale))
    sums = pairwise_lse(x, y, *scales, implementation=implementation)
    return sums.row.sum() + 2 * sums.col.sum() - 30 * sums.positive.sum()


LOSSES = {
    "clip": clip_loss,
    "clip inside": clip_inside,
    "siglip": siglip,
    "retrieval": retrieval_loss,
    "distillation": distillation,
    "matryoshka": matryoshka(clip_loss, (2, DIM)),
    "fastclip": fastclip,
    "lse": lse,
}
SCALARS = {"siglip": (10.0, -5.0), "lse": (10.0, 7.0)}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the loss in a program.

    Attributes:
      needed: indices of the differentiated arguments; None for all.
      batch: number of the batch.
      wrap: transformation of the loss, a key of `WRAPS`.
    """

    needed: tuple[int, ...] | None = None
    batch: int = 0
    wrap: str = "plain"

    def needs(self, argument):
        return self.needed is None or argument in self.needed


def twice(args):
    return jax.tree.map(lambda a: jnp.stack([a, a]), args)


def scanned(loss):
    return lambda *args: lax.scan(lambda _, a: (None, loss(*a)), None, twice(args))[1].mean()


def mapped(loss):
    return lambda *args: jax.vmap(loss)(*twice(args)).mean()


def conditional(loss):
    """Compute the loss in a `lax.cond` whose other branch, never taken, holds the text constant."""
    return lambda *args: lax.cond(args[SCALE] > 0, loss, lambda x, y, *s: loss(x, lax.stop_gradient(y), *s), *args)


POLICIES = jax.checkpoint_policies
WRAPS = {
    "plain": lambda loss: loss,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "save everything": functools.partial(jax.checkpoint, policy=POLICIES.everything_saveable),
    "save dots": functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable),
    "custom policy": functools.partial(jax.checkpoint, policy=lambda primitive, *_, **__: primitive.name == "exp"),
    "cond": conditional,
    "scan": scanned,
    "vmap": mapped,
}


@functools.cache
def oracle_gradients(name):
    """Batches of fp32 arguments, and the float64 gradient of the dense loss for each."""
    batches = [
        (*oracle.features("random", ROWS, ROWS, DIM, seed=seed), *map(np.float32, SCALARS.get(name, (10.0,))))
        for seed in range(BATCHES)
    ]
    loss = functools.partial(LOSSES[name], implementation="dense", mesh=None)
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(loss, tuple(range(len(batches[0])))))
        gradients = [jax.tree.map(np.asarray, gradient(*jax.tree.map(np.float64, batch))) for batch in batches]
    return batches, gradients


class Problem:
    """One loss, implementation and mesh, with the batches and gradients of `oracle_gradients`."""

    def __init__(self, name, implementation, devices):
        mesh = oracle.mesh_of(devices) if devices > 1 else None
        self._loss = functools.partial(LOSSES[name], implementation=implementation, mesh=mesh)
        self.batches, self.expected = oracle_gradients(name)

    def losses(self, program, batches):
        values = []
        for call in program:
            args = (a if call.needs(i) else lax.stop_gradient(a) for i, a in enumerate(batches[call.batch]))
            values.append(WRAPS[call.wrap](self._loss)(*args))
        return jnp.stack(values)

    def loss_of(self, program):
        return lambda batches: self.losses(program, batches).sum()

    def gradient(self, program):
        return jax.jit(jax.grad(self.loss_of(program)))

    def check(self, program, gradients):
        for batch, arguments in enumerate(self.expected):
            for argument, (got, expected) in enumerate(zip(gradients[batch], arguments, strict=True)):
                count = sum(call.batch == batch and call.needs(argument) for call in program)
                error = oracle.absolute_error(got, count * expected) / np.linalg.norm(expected)
                assert error <= 1e-4, f"{program}: batch {batch}, argument {argument}: relative error {error:.1e}"


def one_after_another(problem, programs):
    for program in programs:
        problem.check(program, problem.gradient(program)(problem.batches))


def traced_first(problem, programs):
    """Trace all programs before the first is computed."""
    gradients = [problem.gradient(program).trace(problem.batches) for program in programs]
    for program, gradient in zip(programs, gradients, strict=True):
        problem.check(program, gradient.lower().compile()(problem.batches))


def without_jit(problem, programs):
    for program in programs:
        problem.check(program, jax.grad(problem.loss_of(program))(problem.batches))


def pullbacks_before_use(problem, programs):
    """Make all pullbacks before the first is called, and call them in both orders."""
    pullbacks = [(p, jax.vjp(jax.jit(problem.loss_of(p)), problem.batches)[1]) for p in programs]
    for program, pullback in pullbacks + pullbacks[::-1]:
        problem.check(program, *pullback(jnp.float32(1)))


def pullbacks_in_one_program(problem, programs):
    @jax.jit
    def gradients(batches):
        pullbacks = [jax.vjp(problem.loss_of(program), batches)[1] for program in programs]
        return [pullback(jnp.float32(1))[0] for pullback in reversed(pullbacks)]

    for program, gradient in zip(reversed(programs), gradients(problem.batches), strict=True):
        problem.check(program, gradient)


def jacobian(problem, programs):
    for program in programs:
        rows = jax.jit(jax.jacrev(functools.partial(problem.losses, program)))(problem.batches)
        problem.check(program, jax.tree.map(lambda a: a.sum(0), rows))


ORDERS = (one_after_another, traced_first, without_jit, pullbacks_before_use, pullbacks_in_one_program, jacobian)
ALL, IMAGES, SCALES = Call(), Call((IMAGE,)), Call((SCALE,))
TWO = (ALL, Call((IMAGE, SCALE), batch=1))  # the second call holds the text constant


def wrapped(program, wrap):
    return tuple(dataclasses.replace(call, wrap=wrap) for call in program)


CASES = {
    "one argument, then all": (one_after_another, [(IMAGES,), (ALL,), (SCALES,), (ALL,)]),
    "all traced before one": (traced_first, [(ALL,), (IMAGES,)]),
    "two calls": (one_after_another, [TWO]),
    "two calls, the first with a constant": (one_after_another, [TWO[::-1]]),
    "two calls, one with a constant scale": (one_after_another, [(ALL, Call((IMAGE, TEXT), batch=1))]),
    **{order.__name__: (order, [TWO]) for order in (without_jit, jacobian)},
    **{order.__name__: (order, [(ALL,), (IMAGES,)]) for order in (pullbacks_before_use, pullbacks_in_one_program)},
    **{wrap: (traced_first, [wrapped(TWO, wrap), (IMAGES,)]) for wrap in WRAPS if wrap != "plain"},
}
IMPLEMENTATIONS = dict.fromkeys(LOSSES, available_implementations())
IMPLEMENTATIONS |= {"siglip": ("xla", "ring"), "distillation": ("xla", "ring", "dense")}
SETTINGS = [
    (name, implementation, devices)
    for name, implementations in IMPLEMENTATIONS.items()
    for implementation in implementations
    for devices in {"lse": (1,), "clip inside": (DEVICES,)}.get(name, (1, DEVICES))
]
# By default, MAIN runs every case but FURTHER, and each of OTHERS runs "two calls".
MAIN = ("clip", "xla", DEVICES)
OTHERS = [
    ("clip", "xla", 1),
    ("clip", "ring", DEVICES),
    ("clip", "disco", DEVICES),
    ("siglip", "xla", 1),
    ("siglip", "ring", DEVICES),
    ("retrieval", "xla", DEVICES),
    ("distillation", "xla", 1),
    ("distillation", "ring", DEVICES),
    ("clip inside", "xla", DEVICES),
    ("matryoshka", "xla", DEVICES),
    ("fastclip", "xla", DEVICES),
    ("lse", "xla", 1),
]
FURTHER = {"save everything", "save dots"}  # policies, as "custom policy"
EVERY_RUN = {(MAIN, case) for case in CASES.keys() - FURTHER} | {(setting, "two calls") for setting in OTHERS}


SLOW = {(MAIN, wrap) for wrap in WRAPS if wrap != "cond"}


def case_of(setting, case):
    marks = pytest.mark.slow if (setting, case) in SLOW else []
    marks = marks if (setting, case) in EVERY_RUN else pytest.mark.full
    return pytest.param(setting, case, marks=marks, id="-".join(map(str, (*setting, case))))


@pytest.mark.parametrize(("setting", "case"), [case_of(setting, case) for setting in SETTINGS for case in CASES])
def test_gradients_match_float64(setting, case):
    order, programs = CASES[case]
    order(Problem(*setting), programs)


@functools.cache
def program_lists(arguments):
    """Hypothesis strategy of lists of programs, for a loss with this number of arguments."""
    needed = st.sets(st.integers(0, arguments - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    calls = st.builds(Call, needed, st.integers(0, BATCHES - 1), st.sampled_from(tuple(WRAPS)))
    return st.lists(st.lists(calls, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("setting", "examples"),
    [
        pytest.param(MAIN, 2, marks=pytest.mark.slow),
        *(pytest.param(setting, 12, marks=pytest.mark.full) for setting in SETTINGS),
    ],
)
def test_random_programs_match_float64(setting, examples):
    problem = Problem(*setting)

    def check(data):
        data.draw(st.sampled_from(ORDERS))(problem, data.draw(program_lists(len(problem.batches[0]))))

    properties.run(check, examples)


@pytest.mark.parametrize("setting", [MAIN, ("siglip", "xla", 1), ("distillation", "ring", DEVICES)], ids=str)
def test_flops_of_two_calls_are_those_of_each(setting):
    """No call computes a gradient that only the other needs."""
    problem = Problem(*setting)

    def flops(program):
        return problem.gradient(program).lower(problem.batches).cost_analysis()["flops"]

    assert flops(TWO) == flops(TWO[:1]) + flops(TWO[1:])
    assert flops(TWO[1:]) < flops(TWO[:1])


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("siglip", "triton"),
        *(pytest.param(name, "triton", marks=pytest.mark.full) for name in ("clip", "retrieval", "distillation")),
        *(pytest.param(name, "mosaic_gpu", marks=pytest.mark.full) for name in ("clip", "retrieval")),
    ],
)
def test_fused_kernels_match_float64(name, implementation, monkeypatch, capsys):
    """Run two calls of one jitted loss in the kernel interpreters."""
    if implementation == "triton":
        triton_interpreter.install(monkeypatch)
        interpreter = under(ALONE)
    else:
        interpreter = interpreted(capsys)
    with interpreter:
        one_after_another(Problem(name, implementation, 1), [wrapped(TWO, "jit")])
