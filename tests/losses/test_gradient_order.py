"""Gradients do not depend on other gradients, traced before, after or in the same program.

A program is a sum of calls of one loss. Each call has a batch of its own and may hold some of its arguments constant.
The expected gradient is the sum of the calls' gradients, each that of a dense matrix in float64.
"""

import dataclasses
import functools
import itertools

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
from infcl_jax.ops.pairwise_lse import available_implementations

ROWS, DIM, BATCHES, DEVICES = 8, 5, 2, 2
IMAGE, TEXT, SCALE = 0, 1, 2


def clip_inside(*args, implementation, mesh):
    """`clip_loss` inside `shard_map`, which needs `jit`."""
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
      needed: arguments with a gradient; the others are constant. None: all.
      batch: number of the batch.
      wrap: transformation of the loss, a key of `WRAPS`.
    """

    needed: tuple[int, ...] | None = None
    batch: int = 0
    wrap: str = "plain"

    def needs(self, argument):
        return self.needed is None or argument in self.needed


def repeated(transform):
    """Average a loss over two equal batches by `transform(loss, stacked arguments)`."""
    return lambda loss: lambda *args: transform(loss, jax.tree.map(lambda a: jnp.stack([a, a]), args)).mean()


def conditional(loss):
    """Compute the loss in one of two branches; the other has constant text."""
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
    "scan": repeated(lambda loss, args: lax.scan(lambda _, a: (None, loss(*a)), None, args)[1]),
    "vmap": repeated(lambda loss, args: jax.vmap(loss)(*args)),
}


@functools.cache
def exact(name):
    """Batches of fp32 arguments, and the gradient of each in float64."""
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
    """Programs of one loss and implementation.

    Attributes:
      batches: arguments of the loss.
      exact: its gradient for each batch, in float64.
    """

    def __init__(self, name, implementation, devices):
        mesh = oracle.mesh_of(devices) if devices > 1 else None
        self._loss = functools.partial(LOSSES[name], implementation=implementation, mesh=mesh)
        self.batches, self.exact = exact(name)

    def losses(self, program, batches):
        values = []
        for call in program:
            args = (a if call.needs(i) else lax.stop_gradient(a) for i, a in enumerate(batches[call.batch]))
            values.append(WRAPS[call.wrap](self._loss)(*args))
        return jnp.stack(values)

    def sum(self, program):
        return lambda batches: self.losses(program, batches).sum()

    def gradient(self, program):
        return jax.jit(jax.grad(self.sum(program)))

    def check(self, program, gradients):
        for batch, expected in enumerate(self.exact):
            for argument, (got, gradient) in enumerate(zip(gradients[batch], expected, strict=True)):
                calls = sum(call.batch == batch and call.needs(argument) for call in program)
                error = oracle.absolute_error(got, calls * gradient) / np.linalg.norm(gradient)
                assert error <= 1e-4, f"batch {batch}, argument {argument}: error {error}"


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
        problem.check(program, jax.grad(problem.sum(program))(problem.batches))


def live(problem, programs):
    """Make all pullbacks before the first is called, and call them in both orders."""
    pullbacks = [(p, jax.vjp(jax.jit(problem.sum(p)), problem.batches)[1]) for p in programs]
    for program, pullback in pullbacks + pullbacks[::-1]:
        problem.check(program, *pullback(jnp.float32(1)))


def live_in_one_program(problem, programs):
    @jax.jit
    def gradients(batches):
        pullbacks = [jax.vjp(problem.sum(program), batches)[1] for program in programs]
        return [pullback(jnp.float32(1))[0] for pullback in pullbacks[::-1]][::-1]

    for program, gradient in zip(programs, gradients(problem.batches), strict=True):
        problem.check(program, gradient)


def jacobian(problem, programs):
    for program in programs:
        rows = jax.jit(jax.jacrev(functools.partial(problem.losses, program)))(problem.batches)
        problem.check(program, jax.tree.map(lambda a: a.sum(0), rows))


ORDERS = (one_after_another, traced_first, without_jit, live, live_in_one_program, jacobian)
ALL, IMAGES, SCALES = Call(), Call((IMAGE,)), Call((SCALE,))
TWO = (ALL, Call((IMAGE, SCALE), batch=1))  # such as an augmented view against a fixed text


def wrapped(program, wrap):
    return tuple(dataclasses.replace(call, wrap=wrap) for call in program)


CASES = {
    "one argument, then all": (one_after_another, [(IMAGES,), (ALL,), (SCALES,), (ALL,)]),
    "all traced before one": (traced_first, [(ALL,), (IMAGES,)]),
    "two calls": (one_after_another, [TWO]),
    "two calls, the first with a constant": (one_after_another, [TWO[::-1]]),
    "two calls, one with a constant scale": (one_after_another, [(ALL, Call((IMAGE, TEXT), batch=1))]),
    **{order.__name__: (order, [TWO]) for order in (without_jit, jacobian)},
    **{order.__name__: (order, [(ALL,), (IMAGES,)]) for order in (live, live_in_one_program)},
    **{wrap: (traced_first, [wrapped(TWO, wrap), (IMAGES,)]) for wrap in WRAPS if wrap != "plain"},
}
IMPLEMENTATIONS = dict.fromkeys(LOSSES, available_implementations())
IMPLEMENTATIONS |= {"siglip": ("xla", "ring"), "distillation": ("xla", "ring", "dense")}
SETTINGS = [
    (name, implementation, devices)
    for name, implementations in IMPLEMENTATIONS.items()
    for implementation in implementations
    for devices in ((1,) if name == "lse" else (1, DEVICES))
]
# Settings of every run: in the first all cases, in the others two calls and one more case each.
MAIN = ("clip", "xla", DEVICES)
OTHERS = [("clip", "xla", 1), ("clip", "ring", DEVICES), ("clip", "disco", DEVICES)]
OTHERS += [(n, *s) for n in ("siglip", "retrieval", "distillation") for s in (("xla", 1), ("xla", 2), ("ring", 2))]
OTHERS += [
    ("clip inside", "xla", DEVICES),
    ("matryoshka", "xla", DEVICES),
    ("fastclip", "xla", DEVICES),
    ("lse", "xla", 1),
]
EVERY_RUN = {(MAIN, case) for case in CASES} | {(setting, "two calls") for setting in OTHERS}
EVERY_RUN |= set(zip(OTHERS, itertools.cycle([case for case in CASES if case != "two calls"]), strict=False))


@pytest.mark.parametrize(
    ("setting", "case"),
    [
        pytest.param(
            *both, marks=[] if both in EVERY_RUN else pytest.mark.full, id="-".join(map(str, (*both[0], both[1])))
        )
        for both in itertools.product(SETTINGS, CASES)
    ],
)
def test_gradients_match_float64(setting, case):
    order, programs = CASES[case]
    order(Problem(*setting), programs)


@functools.cache
def programs(arguments):
    """Hypothesis strategy of programs of a loss, by its number of arguments."""
    needed = st.sets(st.integers(0, arguments - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    calls = st.builds(Call, needed, st.integers(0, BATCHES - 1), st.sampled_from(tuple(WRAPS)))
    return st.lists(st.lists(calls, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("setting", "examples"), [(MAIN, 4), *(pytest.param(setting, 12, marks=pytest.mark.full) for setting in SETTINGS)]
)
def test_random_programs_match_float64(setting, examples):
    problem = Problem(*setting)

    def check(data):
        data.draw(st.sampled_from(ORDERS))(problem, data.draw(programs(len(problem.batches[0]))))

    properties.run(check, examples)


@pytest.mark.parametrize("setting", [MAIN, ("siglip", "xla", 1), ("distillation", "ring", DEVICES)], ids=str)
def test_no_call_pays_for_gradients_that_another_needs(setting):
    problem = Problem(*setting)
    both, everything, some = (
        problem.gradient(program).lower(problem.batches).cost_analysis()["flops"] for program in (TWO, TWO[:1], TWO[1:])
    )
    assert both == everything + some
    assert some < everything


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("siglip", "triton"),
        *(pytest.param(name, "triton", marks=pytest.mark.full) for name in ("clip", "retrieval", "distillation")),
        *(pytest.param(name, "mosaic_gpu", marks=pytest.mark.full) for name in ("clip", "retrieval")),
    ],
)
def test_fused_kernels_match_float64(name, implementation, monkeypatch, capsys):
    """In the interpreters; two calls share one trace."""
    if implementation == "triton":
        triton_interpreter.install(monkeypatch)
    with under(ALONE) if implementation == "triton" else interpreted(capsys):
        one_after_another(Problem(name, implementation, 1), [wrapped(TWO, "jit")])
