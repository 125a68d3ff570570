"""Evaluations that fail, a part of `python -m tests.faults.evaluations`."""

import jax
import pytest

from tests.faults import evaluations


@pytest.fixture(autouse=True)
def promotion():
    """Use the promotion of JAX's defaults, as in a run of its own: optax raises a float to an integer power."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    return {best: evaluations.undisturbed(tmp_path_factory.mktemp("undisturbed"), best) for best in (False, True)}


@pytest.mark.parametrize(
    ("name", "keep_best"),
    [
        ("template", False),
        ("damaged image at the end", True),
        ("out of memory", False),
        pytest.param("on_evaluation", True, marks=pytest.mark.full),
        pytest.param("on_step", False, marks=pytest.mark.full),
        ("on_checkpoint", True),
        pytest.param("killed in the evaluation", True, marks=pytest.mark.slow),
        pytest.param("killed after the results", True, marks=pytest.mark.full),
    ],
)
def test_no_step_is_trained_twice(tmp_path, reference, name, keep_best):
    assert evaluations.check(name, tmp_path, keep_best, reference[keep_best]) == []
