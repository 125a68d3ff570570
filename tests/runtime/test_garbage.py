"""Garbage collection during training."""

import gc

import pytest

from infcl_jax.training import rare_garbage_collection


@pytest.mark.parametrize("frozen", [False, True])
def test_collection_is_rare_and_restored(frozen):
    gc.freeze() if frozen else gc.unfreeze()
    before = gc.get_threshold(), gc.get_freeze_count() > 0
    with pytest.raises(KeyError), rare_garbage_collection():
        assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] >= 50_000
        raise KeyError
    assert (gc.get_threshold(), gc.get_freeze_count() > 0) == before
    gc.freeze()  # as the other tests expect
