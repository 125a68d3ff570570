import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from infcl_jax import pairwise_lse, retrieval_loss
from infcl_jax.ops.pairwise.lse import available_implementations


@functools.cache
def hard_negatives(queries, dtype, each=3):
    """Features, labels, and the loss and its gradients in float64."""
    query, passage = oracle.features("random", queries, queries * each, 33, dtype)
    labels = np.arange(queries) * each + np.arange(queries) % each
    return query, passage, labels, oracle.retrieval(query, passage, 50.0, labels)


@pytest.mark.parametrize(
    ("devices", "rows", "dtype"),
    [(1, 11, jnp.bfloat16), (4, 11, jnp.bfloat16), (2, 521, jnp.float32)],
)
@pytest.mark.parametrize("implementation", available_implementations())
def test_hard_negatives_match_oracle(implementation, devices, rows, dtype):
    query, passage, labels, (expected_value, expected) = hard_negatives(rows * devices, dtype)
    mesh = oracle.mesh_of(devices)

    def loss(query, passage, scale):
        return retrieval_loss(query, passage, scale, labels=labels, mesh=mesh, implementation=implementation)

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, passage, jnp.float32(50))
    assert value == pytest.approx(expected_value, rel=1e-6)
    for got, want in zip(gradients, expected, strict=True):
        assert oracle.relative_error(got, want) <= (1e-2 if dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.parametrize("implementation", available_implementations())
def test_masked_rows_may_hold_anything(implementation):
    args, options, check = oracle.masked_retrieval()
    loss = functools.partial(retrieval_loss, implementation=implementation)
    check(*jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args, **options), 1e-5)


def test_a_label_out_of_range_is_noticed_with_a_mask_under_jit():
    query, passage = oracle.features("random", 4, 4, 33)
    labels, mask = np.array([0, 1, 2, 7]), np.array([True, True, False, True])

    def loss(mask, query):
        return retrieval_loss(query, passage, 20.0, labels=labels, mask=mask)

    assert np.isnan(jax.jit(loss)(mask, query))
    with pytest.raises(ValueError, match=r"labels in \[0, 4\), .* got values 0 to 7"):
        jax.jit(functools.partial(loss, mask))(query)


def test_masks_equal_leaving_out():
    query, passage = oracle.features("random", 8, 16, 33)
    passages, queries = np.arange(16) < 13, np.arange(8) < 6
    loss = retrieval_loss(query, passage, 20.0, mask=queries, passage_mask=passages)
    assert loss == pytest.approx(oracle.retrieval(query[:6], passage[:13], 20.0, np.arange(6))[0], rel=1e-6)


def test_a_query_whose_positive_is_masked_leaves_the_mean():
    query, passage = oracle.features("random", 8, 16, 33)
    passages = np.arange(16) != 3
    loss = jax.jit(lambda query, passage, mask: retrieval_loss(query, passage, 20.0, passage_mask=mask))
    queries, labels = np.arange(8) != 3, np.r_[:3, 3:7]
    assert loss(query, passage, passages) == pytest.approx(
        oracle.retrieval(query[queries], passage[passages], 20.0, labels)[0], rel=1e-6
    )
    positive = pairwise_lse(query, passage, 20.0, y_mask=passages, columns=False).positive
    np.testing.assert_allclose(positive, (query * passage[:8]).sum(1), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="masks the positives of all 8 queries"):
        retrieval_loss(query, passage, 20.0, passage_mask=np.arange(16) >= 8)


@pytest.mark.parametrize("mask", [None, np.arange(8) < 7])
def test_a_positive_on_another_device_is_an_error(mask):
    query, passage = oracle.features("random", 8, 16, 33)
    loss = functools.partial(retrieval_loss, query, passage, 1.0, mask=mask, mesh=oracle.mesh_of(4))
    assert np.isfinite(loss(labels=2 * np.arange(8)))
    with pytest.raises(ValueError, match="query 4 on device 2 and passage 3 on device 0"):
        loss(labels=np.array([0, 2, 4, 6, 3, 10, 12, 0]))


@pytest.mark.parametrize("labels", [np.zeros(4, np.int32), np.zeros(8, np.float32), np.zeros((8, 1), np.int32)])
@pytest.mark.parametrize("options", [{"mesh": oracle.mesh_of(4)}, {"passage_mask": np.ones(16, bool)}])
def test_labels_of_another_shape_or_dtype_are_named(labels, options):
    query, passage = oracle.features("random", 8, 16, 9)
    with pytest.raises(ValueError, match=r"expected integer labels of shape \(8,\)"):
        retrieval_loss(query, passage, 1.0, labels=labels, **options)


def test_unknown_label_is_an_error_and_never_a_silent_number():
    query, passage = oracle.features("random", 8, 16, 33)
    labels = np.arange(8) + 9
    with pytest.raises(ValueError, match=r"labels in \[0, 16\)"):
        retrieval_loss(query, passage, 1.0, labels=labels)
    with pytest.raises(ValueError, match=r"labels in \[0, 16\)"):
        retrieval_loss(query, passage, 1.0, labels=labels, mesh=oracle.mesh_of(4))
    traced = jax.value_and_grad(lambda *args, labels: retrieval_loss(*args, labels=labels), argnums=(0, 1, 2))
    value, gradients = jax.jit(traced)(query, passage, 1.0, labels=labels)
    assert np.isnan(value) and all(np.isnan(g).any() for g in gradients)
    with pytest.raises(ValueError, match="expected labels when there are more passages"):
        retrieval_loss(query, passage, 1.0, mesh=oracle.mesh_of(4))
    with pytest.raises(ValueError, match="expected labels, or at least as many rows"):
        retrieval_loss(passage, query, 1.0)
