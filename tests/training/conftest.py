import pytest

from infcl_jax.training import sharding


@pytest.fixture
def small_arrays_sharded(monkeypatch):
    """Shard the arrays of the smallest models too."""
    monkeypatch.setattr(sharding, "MIN_SIZE", 16)
