import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from infcl_jax import retrieval_loss
from infcl_jax.pairwise import available_implementations


def retrieval(query, passage, scale, labels):
    x, y = np.asarray(query, np.float64), np.asarray(passage, np.float64)
    s, rows = x @ y.T, np.arange(len(x))
    row = oracle.log_sum_exp(scale * s, 1)
    d_logits = np.exp(scale * s - row[:, None]) / len(x)
    d_logits[rows, labels] -= 1 / len(x)
    loss = (row - scale * s[rows, labels]).mean()
    return loss, (scale * d_logits @ y, scale * d_logits.T @ x, (d_logits * s).sum())


@pytest.mark.parametrize(
    ("devices", "rows", "dtype"),
    [(1, 11, jnp.bfloat16), (4, 11, jnp.float32), (4, 11, jnp.bfloat16), (2, 1003, jnp.float32)],
)
@pytest.mark.parametrize("implementation", available_implementations())
def test_hard_negatives_match_oracle(implementation, devices, rows, dtype):
    queries, each = rows * devices, 3
    query, passage = oracle.features("random", queries, queries * each, 33, dtype)
    labels = np.arange(queries) * each + np.arange(queries) % each
    mesh = oracle.mesh_of(devices)

    def loss(query, passage, scale):
        return retrieval_loss(query, passage, scale, labels=labels, mesh=mesh, implementation=implementation)

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, passage, jnp.float32(50))
    expected_value, expected = retrieval(query, passage, 50.0, labels)
    assert value == pytest.approx(expected_value, rel=1e-6)
    for got, want in zip(gradients, expected, strict=True):
        assert oracle.relative_error(got, want) <= (1e-2 if dtype == jnp.bfloat16 else 1e-5)


def test_masks_equal_leaving_out():
    query, passage = oracle.features("random", 8, 16, 33)
    passages, queries = np.arange(16) < 13, np.arange(8) < 6
    loss = retrieval_loss(query, passage, 20.0, mask=queries, passage_mask=passages)
    assert loss == pytest.approx(retrieval(query[:6], passage[:13], 20.0, np.arange(6))[0], rel=1e-6)


def test_unknown_label_is_an_error_and_never_a_silent_number():
    query, passage = oracle.features("random", 8, 16, 33)
    labels = np.arange(8) + 9
    with pytest.raises(ValueError, match=r"labels in \[0, 16\)"):
        retrieval_loss(query, passage, 1.0, labels=labels)
    with pytest.raises(ValueError, match=r"labels in \[0, 16\)"):
        retrieval_loss(query, passage, 1.0, labels=labels, mesh=oracle.mesh_of(4))
    assert np.isnan(jax.jit(lambda labels: retrieval_loss(query, passage, 1.0, labels=labels))(labels))
    with pytest.raises(ValueError, match="expected labels when there are more passages"):
        retrieval_loss(query, passage, 1.0, mesh=oracle.mesh_of(4))
    with pytest.raises(ValueError, match="expected labels, or at least as many rows"):
        retrieval_loss(passage, query, 1.0)
