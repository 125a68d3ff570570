"""Search for the cause of a wrong gradient, one change at a time."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from infcl_jax.grad_cache.chunks import Array
from infcl_jax.verification.reference import Groups, Problem, float64, groups_of, wide
from infcl_jax.verification.report import Cause, GroupError

Expected = tuple[float, Any]  # loss and gradients of the reference

# Relative error of a central difference with a step of 1e-3 that is still agreement; fp32 rounding is below 1e-3.
_SLOPE_STEP, _SLOPE_RTOL = 1e-3, 1e-2
# Groups whose gradient is below this share of the whole are compared with it, not with their own rounding error.
_FLOOR = 1e-6
# Largest error by rounding to bf16, in which features near scale 100 lose about 4 % of the gradient.
_BF16_ERROR = 0.2
_LOW_PRECISION = ("bf16[", "f16[", "f8_")
# Largest rounding error of a set-up relative to the undivided loss's, whose sums are in another order.
_ROUNDING_FACTOR = 10


@dataclasses.dataclass(frozen=True)
class SetUp:
    """The set-up under test: `function(params, batch)`, or `function(params, batch, rng)` if it takes a key."""

    function: Callable[..., tuple[Any, Any]]
    params: Any
    batch: Mapping[str, Any]
    takes_rng: bool
    rng: Array | None
    sharding: NamedSharding | None  # of the rows of further batches

    def __call__(self) -> tuple[Any, Any]:
        """Compute the loss and its gradients."""
        return self.function(self.params, self.batch, *self._key)

    @property
    def _key(self) -> tuple[Array | None, ...]:
        return (self.rng,) if self.takes_rng else ()

    def in_float64(self) -> "SetUp":
        """Return the set-up with parameters and batch in float64."""
        return dataclasses.replace(self, params=wide(self.params), batch=wide(dict(self.batch)))

    def has_low_precision(self) -> bool:
        """Return whether the traced program has bf16, fp16 or fp8 values."""
        try:
            program = str(jax.make_jaxpr(self.function)(self.params, dict(self.batch), *self._key))
        except Exception:  # a function of the user that reads concrete values
            return False
        return any(name in program for name in _LOW_PRECISION)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Loss and gradients of a set-up by group, with their relative errors and the largest accepted one."""

    loss: float
    loss_error: float
    groups: dict[str, GroupError]
    grads: Groups
    rtol: float

    @classmethod
    def compare(cls, value: Any, grads: Any, expected: Expected, frozen: Collection[str], rtol: float) -> "Measured":
        """Compare a loss and gradients with a reference."""
        loss = float(value)
        got, want = groups_of(grads, frozen), groups_of(expected[1], frozen)
        floor = _FLOOR * float(np.sqrt(sum(_norm(group) ** 2 for group in want.values())))
        errors = {name: _group_error(name, got[name], want[name], floor) for name in want}
        error = abs(loss - expected[0]) / max(abs(expected[0]), _FLOOR)
        return cls(loss, error if np.isfinite(loss) else np.inf, errors, got, rtol)

    @property
    def wrong(self) -> list[GroupError]:
        """Groups with an error above `rtol`; NaN is an error."""
        return [group for group in self.groups.values() if not group.error <= self.rtol]

    @property
    def ok(self) -> bool:
        """True if the loss and all gradients are right."""
        return not self.wrong and self.loss_error <= self.rtol

    @property
    def largest_error(self) -> float:
        """Largest error of the loss and the gradients."""
        return float(np.max([self.loss_error, *(group.error for group in self.groups.values())]))  # NaN stays


def find_causes(
    problem: Problem,
    set_up: SetUp,
    measured: Measured,
    expected: Expected,
    frozen: Collection[str],
    rtol: float,
) -> tuple[tuple[Cause, ...], tuple[str, ...]]:
    """Name the cause of an error, and notes.

    Without a cause, the note says why the difference is not an error.
    """
    if problem.rng is not None:
        problem = dataclasses.replace(problem, rng=None)
        without, without_expected = _without_rng(problem, set_up, frozen, rtol)
        if without is None:
            return (_unknown(set_up),), ("an encoder needs a key, so no cause was looked for",)
        if without.ok:
            return _random_cause(set_up)
        set_up, measured, expected = dataclasses.replace(set_up, rng=None), without, without_expected
    if not np.isfinite(measured.largest_error):
        return (_not_finite(measured),), ()
    exact = _in_float64(set_up, expected, frozen, rtol)
    if exact is not None and exact.ok:
        text = f"the largest error falls from {measured.largest_error:.1e} to {exact.largest_error:.1e} in float64"
        return (_low_precision(text),), ()
    measured = exact or measured
    # A set-up that casts to fp32 stays in fp32. Only errors above its rounding tell which groups are wrong.
    undivided = Measured.compare(*problem.value_and_grad(narrow=True), expected, frozen, rtol).largest_error
    rounding = _ROUNDING_FACTOR * undivided
    if measured.largest_error <= rounding:
        text = (
            f"the largest error, {measured.largest_error:.1e}, is due to rounding: without float64, the undivided loss "
            f"has an error of {undivided:.1e}"
        )
        return (_low_precision(text),), ()
    if rtol < rounding < _SLOPE_RTOL:
        rtol, measured = rounding, dataclasses.replace(measured, rtol=rounding)
    cause = _scaled(problem, set_up, measured, frozen, rtol) or _other_rows(problem, measured, expected, rtol)
    if cause is None and problem.mixes_rows():
        cause = Cause(
            "batch_statistics",
            "an encoder's features of a row depend on the other rows, as in batch normalization, so they depend on "
            "chunks and devices; use statistics of the global batch, frozen ones, or another normalization",
        )
    if cause is None and measured.largest_error < _BF16_ERROR and set_up.has_low_precision():
        text = f"the program computes in bf16, fp16 or fp8, with an error of {measured.largest_error:.1e}"
        cause = Cause("low_precision", f"{text}; raise the precision of features or sums, or rtol")
    if cause is None:
        cause = _unknown(set_up)
    return (cause,), ()


def update_causes(params: Any, updated: Any, grads: Any, frozen: Collection[str]) -> tuple[Cause, ...]:
    """Check that an update moves the trained groups and no frozen one."""
    old, new, gradients = groups_of(params), groups_of(updated), groups_of(grads)
    moved = {name for name in old if _norm([b - a for a, b in zip(old[name], new[name], strict=True)]) != 0}
    still = [name for name in old if name not in moved and name not in frozen and _norm(gradients[name]) > 0]
    causes = []
    if wrong := sorted(moved & set(frozen)):
        text = f"the update changes the frozen groups {wrong}; leave them out of weight decay and momentum"
        causes.append(Cause("frozen_moved", text))
    if still:
        text = f"the update does not change the trained groups {still}, whose gradient is not zero"
        causes.append(Cause("trained_still", text))
    return tuple(causes)


def _in_float64(set_up: SetUp, expected: Expected, frozen: Collection[str], rtol: float) -> Measured | None:
    """Repeat the comparison with a float64 set-up; None if it raises."""
    try:
        with float64():
            return Measured.compare(*set_up.in_float64()(), expected, frozen, rtol)
    except Exception:  # whatever code written for fp32 raises
        return None


def _without_rng(
    plain: Problem, set_up: SetUp, frozen: Collection[str], rtol: float
) -> tuple[Measured | None, Expected]:
    """Repeat the comparison without randomness; None if an encoder needs a key."""
    try:
        expected = plain.value_and_grad()
        return Measured.compare(*dataclasses.replace(set_up, rng=None)(), expected, frozen, rtol), expected
    except Exception:  # whatever code written for keys raises without one
        return None, (0.0, None)


def _random_cause(set_up: SetUp) -> tuple[tuple[Cause, ...], tuple[str, ...]]:
    """Distinguish keys that differ between the passes from other keys than the reference's."""
    if _is_own_gradient(set_up):
        return (), (
            "the random keys are not those of cached_value_and_grad, so the comparison was without randomness; the "
            "gradient is that of the set-up's own loss",
        )
    text = "without randomness the gradients are right, and with it they are not those of the set-up's own loss"
    return (Cause("random_key", f"{text}; draw the same keys in both passes"),), ()


def _is_own_gradient(set_up: SetUp) -> bool:
    """Compare the gradient with a central difference of the set-up's own loss along it."""
    _, grads = set_up()
    norm = _norm([np.asarray(g, np.float64) for g in jax.tree.leaves(jax.device_get(grads))])
    if not 0 < norm < np.inf:
        return False

    def along(step: float) -> float:
        moved = jax.tree.map(lambda p, g: p + (step / norm * g).astype(p.dtype), set_up.params, grads)
        return float(dataclasses.replace(set_up, params=moved)()[0])

    slope = (along(_SLOPE_STEP) - along(-_SLOPE_STEP)) / (2 * _SLOPE_STEP)
    return abs(slope - norm) <= _SLOPE_RTOL * norm


def _scaled(problem: Problem, set_up: SetUp, measured: Measured, frozen: Collection[str], rtol: float) -> Cause | None:
    """Recognize gradients that differ by factors alone."""
    wrong = measured.wrong
    if not wrong or not all(_is_factor(group, rtol) for group in wrong):
        return None
    factors, chunks, devices = [group.factor for group in wrong], problem.chunks, problem.devices
    names = ", ".join(group.name for group in wrong)
    power = _common_power(factors, devices, rtol)
    by_chunks = chunks > 1 and all(_near(factor, 1 / chunks, rtol) for factor in factors)
    if by_chunks and (power is None or _falls_with_chunks(problem, set_up, factors[0], frozen, rtol)):
        text = f"the gradients of {names} are 1/{chunks} of the reference, with {chunks} chunks"
        return Cause("mean_over_chunks", f"{text}; sum the gradients of the chunks")
    if power is not None:
        name = "psum_too_many" if power > 0 else "psum_too_few"
        text = f"the gradients of {names} are {devices}^{power} of the reference, on {devices} devices"
        remedy = "remove a psum, or check_vma=False of shard_map" if power > 0 else "sum over devices, not mean"
        return Cause(name, f"{text}; {remedy}")
    if all(abs(factor) <= rtol for factor in factors):
        return Cause("no_gradient", f"{names} get no gradient; look for stop_gradient, or freeze them on purpose")
    values = ", ".join(f"{factor:.4g}" for factor in factors)
    return Cause("scaled", f"the gradients of {names} are the reference times {values}")


def _common_power(factors: list[float], devices: int, rtol: float) -> int | None:
    """Return the p of -2, -1, 1, 2 with all factors `devices ** p`."""
    powers = (p for p in (1, -1, 2, -2) if all(_near(f, float(devices) ** p, rtol) for f in factors))
    return next(powers, None) if devices > 1 else None


def _falls_with_chunks(problem: Problem, set_up: SetUp, factor: float, frozen: Collection[str], rtol: float) -> bool:
    """Test whether a batch with twice the chunks halves the factor."""
    double = problem.doubled()
    batch = dict(double.batch) if set_up.sharding is None else jax.device_put(dict(double.batch), set_up.sharding)
    try:
        value, grads = dataclasses.replace(set_up, batch=batch)()
    except (TypeError, ValueError):  # a function of one batch size
        return False
    again = Measured.compare(value, grads, double.value_and_grad(), frozen, rtol)
    return any(_near(group.factor, factor / 2, rtol) for group in again.wrong)


def _other_rows(problem: Problem, measured: Measured, expected: Expected, rtol: float) -> Cause | None:
    """Recognize gradients of other pairs, or of the features of some rows only."""
    powers = list(itertools.product((-1, 0, 1), repeat=2))
    allowed = {float(problem.devices) ** p * float(problem.chunks) ** q for p, q in powers}
    right = groups_of(expected[1])
    for name, text, grads in _mistakes(problem):
        want = groups_of(grads)
        # A group that the mistake leaves as it is, such as a logit scale, may be wrong in its own way.
        names = [g.name for g in measured.wrong if _group_error(g.name, want[g.name], right[g.name], 0).error > rtol]
        errors = [_group_error(name, measured.grads[name], want[name], 0) for name in names]
        if errors and all(_is_factor(e, rtol) and any(_near(e.factor, f, rtol) for f in allowed) for e in errors):
            return Cause(name, text)
    return None


def _mistakes(problem: Problem) -> Iterator[tuple[str, str, Any]]:
    """Yield name, explanation and gradients of mistakes."""
    devices, chunks = problem.devices, problem.chunks
    if devices > 1:
        blocks = [problem.device_rows(device) for device in range(devices)]
        own = [problem.subset(rows).value_and_grad()[1] for rows in blocks]
        text = "the loss compares only the pairs of each device; pass axis_name inside shard_map, or mesh outside"
        yield "missing_axis_name", text, _mean(own)
        yield "missing_axis_name", f"{text}; and only the gradient of the first device is kept", own[0]
        text = "only the rows of one device reach the gradients; sum them over devices"
        for rows in (blocks[0], blocks[-1]):
            yield "psum_too_few", text, problem.value_and_grad(only=rows)[1]
    if chunks > 1:
        blocks = [problem.chunk_rows(chunk) for chunk in range(chunks)]
        text = "the loss compares only the pairs of each chunk, as in gradient accumulation; compute it over all rows"
        yield "chunk_losses", text, _mean([problem.subset(rows).value_and_grad()[1] for rows in blocks])
        text = "only the rows of one chunk reach the gradients; accumulate them"
        for rows in (blocks[-1], blocks[0]):
            yield "chunk_overwritten", text, problem.value_and_grad(only=rows)[1]
        if devices > 1:
            shards = [np.intersect1d(problem.device_rows(d), rows) for d in range(devices) for rows in blocks]
            text = "the loss compares only the pairs of one device's rows of a chunk; compute it over all rows"
            yield "chunk_losses", text, _mean([problem.subset(rows).value_and_grad()[1] for rows in shards])


def _low_precision(text: str) -> Cause:
    return Cause("low_precision", f"{text}; raise the precision of parameters, features or sums, or rtol")


def _not_finite(measured: Measured) -> Cause:
    names = [name for name, group in measured.groups.items() if not np.isfinite(group.error)]
    names += [] if np.isfinite(measured.loss_error) else ["the loss"]
    return Cause("not_finite", f"{', '.join(names)} not finite; look for the norm or the logarithm of zero")


def _unknown(set_up: SetUp) -> Cause:
    """Test whether an unexplained gradient is that of the set-up's own loss."""
    another = "the gradient is that of the set-up's own loss, which is another loss"
    wrong = "the gradient is not that of the set-up's own loss; compare the passes of your loop one by one"
    return Cause("unknown", another if _is_own_gradient(set_up) else wrong)


def _group_error(name: str, got: list[np.ndarray], want: list[np.ndarray], floor: float) -> GroupError:
    norm = _norm(want)
    difference = _norm([a - b for a, b in zip(got, want, strict=True)])
    dot = sum(float(np.vdot(a, b)) for a, b in zip(got, want, strict=True))
    error = difference / max(norm, floor) if difference else 0.0
    return GroupError(name, norm, error, dot / norm**2 if norm else float("nan"))


def _is_factor(group: GroupError, rtol: float) -> bool:
    """Test whether the gradient is a multiple of the reference."""
    return group.error**2 - (group.factor - 1) ** 2 <= (rtol * max(abs(group.factor), rtol)) ** 2 + 1e-15


def _near(a: float, b: float, rtol: float) -> bool:
    return abs(a - b) <= rtol * abs(b)


def _norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.vdot(a, a)) for a in arrays)))


def _mean(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0), *trees)
